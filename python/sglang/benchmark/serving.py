"""One serving benchmark from its options to its figures."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from sglang.benchmark.client import Outcome, ServerClient
from sglang.benchmark.figures import AcceptCounts, compute
from sglang.benchmark.load import LoadResult, arrival_times, send_all
from sglang.benchmark.options import BenchError, ServingOptions
from sglang.benchmark.prompts import Prompt, Vocabulary, make_prompts, warm_up_prompt
from sglang.bundled import resolve_model_path
from sglang.srt.managers.tokenizer import Tokenizer


async def run_serving_benchmark(
    options: ServingOptions, *, during: AbstractAsyncContextManager[Any] | None = None
) -> dict[str, Any]:
    """Ask a running server and return the figures of ``figures.compute``.

    during  entered while the measured requests run, after warm-up and flush
    Raises: BenchError if the options cannot work, the server does not answer, or no request of the
    warm-up or of the run succeeds.
    """
    options.check()
    async with ServerClient(options) as client:
        await client.wait_ready(options.ready_check_timeout_sec)
        model = options.model or await client.first_model()
        if model is None and options.kind.route != "native":
            raise BenchError(f"{options.base_url} names no model in /v1/models; give --model NAME")
        client.model = options.served_model_name or model
        options = replace(options, model=model)
        vocabulary = await _vocabulary(options, client)
        prompts = make_prompts(options, vocabulary)
        await _warm_up(options, client, prompts)
        if options.flush_cache:
            await client.flush_cache()
        before = AcceptCounts.read(await _server_info(options, client))
        async with during or nullcontext():
            load = await send_all(
                client.run,
                prompts,
                due_s=arrival_times(len(prompts), options.request_rate, options.seed),
                max_concurrency=options.max_concurrency,
                show_progress=not options.disable_tqdm,
            )
        info = await _server_info(options, client)
    _require_success(load.outcomes, "every request failed")
    return compute(
        options,
        load,
        retokenized=_retokenized(load, vocabulary.tokenizer),
        accept_length=AcceptCounts.read(info).since(before),
        server_info=info if isinstance(info, dict) else None,
    )


async def _warm_up(
    options: ServingOptions, client: ServerClient, prompts: Sequence[Prompt]
) -> None:
    """Answer some short requests first, so that the run does not time what happens only once."""
    if options.warmup_requests == 0:
        return
    chosen = [prompts[i % len(prompts)] for i in range(options.warmup_requests)]
    load = await send_all(
        client.run,
        [warm_up_prompt(prompt) for prompt in chosen],
        due_s=[0.0] * len(chosen),
        max_concurrency=options.max_concurrency,
        show_progress=False,
    )
    _require_success(load.outcomes, "every warm-up request failed")


def _require_success(outcomes: Sequence[Outcome], what: str) -> None:
    if not any(outcome.success for outcome in outcomes):
        raise BenchError(f"{what}; the first said: {outcomes[0].error}")


async def _server_info(options: ServingOptions, client: ServerClient) -> Any:
    if not options.kind.is_sglang:
        return None
    return await client.ask("/server_info") or await client.ask("/get_server_info")


async def _vocabulary(options: ServingOptions, client: ServerClient) -> Vocabulary:
    """The tokenizer of --tokenizer, else of the model where it lies on this machine."""
    info = None
    if options.kind.is_sglang:
        info = await client.ask("/model_info") or await client.ask("/get_model_info")
    info = info if isinstance(info, dict) else {}
    size = info.get("vocab_size")
    tokenizer = None
    if options.tokenizer is not None:
        try:
            tokenizer = Tokenizer(resolve_model_path(options.tokenizer))
        except ValueError as error:
            raise BenchError(str(error).replace("--tokenizer-path", "--tokenizer")) from error
    else:
        for name in (info.get("tokenizer_path"), info.get("model_path"), options.model):
            if isinstance(name, str) and _has_tokenizer(resolve_model_path(name)):
                tokenizer = Tokenizer(resolve_model_path(name))
                break
    return Vocabulary(tokenizer, size if isinstance(size, int) else None)


def _has_tokenizer(name: str) -> bool:
    folder = Path(name)
    return folder.is_dir() and (folder / "tokenizer.json").is_file()


def _retokenized(load: LoadResult, tokenizer: Tokenizer | None) -> int | None:
    if tokenizer is None:
        return None
    texts = [outcome.text for outcome in load.outcomes if outcome.success]
    return sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts)


def note(text: str) -> None:
    """A remark for the person at the terminal, apart from the table."""
    print(text, file=sys.stderr, flush=True)
