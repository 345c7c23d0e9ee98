"""`python -m sglang.bench_serving`: speed of a running server, ours or another.

    python -m sglang.bench_serving --backend sglang --dataset-name random-ids \\
        --random-input-len 1024 --random-output-len 128 --num-prompts 64 --max-concurrency 8

Sends requests, times every token, prints a table and appends one JSON object a run to --output-file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang.benchmark.figures import table
from sglang.benchmark.options import (
    BACKENDS,
    DATASETS,
    PORTS,
    BenchError,
    LengthOptions,
    ServingOptions,
    check_range,
)
from sglang.benchmark.serving import note, run_serving_benchmark

WANTED_OPEN_FILES = 65535


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang.bench_serving",
        description="Measure throughput and latency of a running server.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_server_flags(parser.add_argument_group("Server"))
    _add_dataset_flags(parser.add_argument_group("Requests"))
    _add_load_flags(parser.add_argument_group("Load"))
    _add_output_flags(parser.add_argument_group("Output"))
    return parser


def _add_server_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--backend",
        choices=BACKENDS,
        default="sglang",
        help="What kind of server answers: sglang is POST /generate, names with -chat are "
        "/v1/chat/completions, the others /v1/completions; openai sends only fields of OpenAI's",
    )
    group.add_argument("--base-url", help="Address of the server, instead of --host and --port")
    group.add_argument("--host", default="127.0.0.1", help="Host of the server")
    group.add_argument(
        "--port", type=int, help="Port of the server; 30000 for sglang, 8000 for others"
    )
    group.add_argument("--model", help="Model to ask for; the first of /v1/models if not given")
    group.add_argument("--served-model-name", help="Name of the model in requests, if another")
    group.add_argument(
        "--tokenizer",
        help="Folder or file of the tokenizer; the model's if it lies on this machine",
    )
    group.add_argument(
        "--header",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="Headers of every request; OPENAI_API_KEY becomes a bearer token",
    )
    group.add_argument(
        "--ready-check-timeout-sec",
        type=float,
        default=60.0,
        help="Seconds to wait for the server's first answer",
    )


def _add_dataset_flags(group: argparse._ArgumentGroup) -> None:
    own = LengthOptions()
    group.add_argument(
        "--dataset-name",
        choices=DATASETS,
        default="sharegpt",
        help="sharegpt: first turns of a ShareGPT JSON file; random: texts of --dataset-path cut or "
        "repeated to drawn lengths, without a file like random-ids; random-ids: drawn token ids; "
        "generated-shared-prefix: groups with a common beginning; custom: a JSONL file",
    )
    group.add_argument(
        "--dataset-path",
        help="File of sharegpt, random or custom; a line of custom holds a prompt (text or ids) and "
        "output_len, or conversations",
    )
    group.add_argument("--num-prompts", type=int, default=1000, help="Requests to send")
    numbers: dict[str, tuple[Any, str]] = {
        "--random-input-len": (own.random_input_len, "Most tokens of a random prompt"),
        "--random-output-len": (own.random_output_len, "Most tokens of its answer"),
        "--sharegpt-output-len": (None, "Tokens of each answer, instead of the reply's own length"),
        "--sharegpt-context-len": (None, "Leave out conversations longer than this"),
        "--gsp-num-groups": (own.gsp_num_groups, "Groups of generated-shared-prefix"),
        "--gsp-prompts-per-group": (own.gsp_prompts_per_group, "Requests of a group"),
        "--gsp-system-prompt-len": (own.gsp_system_prompt_len, "Tokens that a group shares"),
        "--gsp-question-len": (own.gsp_question_len, "Tokens of a request's own"),
        "--gsp-output-len": (own.gsp_output_len, "Tokens of each answer"),
    }
    for flag, (default, text) in numbers.items():
        group.add_argument(flag, type=int, default=default, help=text)
    group.add_argument(
        "--random-range-ratio",
        type=float,
        default=own.random_range_ratio,
        help="Random lengths are drawn from this share of the given ones to the whole; 1 is exact",
    )
    group.add_argument(
        "--tokenize-prompt", action="store_true", help="Send token ids instead of text"
    )
    group.add_argument("--seed", type=int, default=1, help="Of prompts, lengths and arrivals")
    group.add_argument(
        "--extra-request-body",
        metavar="JSON",
        help="Object merged into every request; with --backend sglang unknown names go to "
        "sampling_params",
    )
    group.add_argument(
        "--disable-ignore-eos", action="store_true", help="Let answers end at the end token"
    )
    group.add_argument(
        "--disable-stream", action="store_true", help="Ask for whole answers; TTFT is then E2E"
    )


def _add_load_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--request-rate",
        type=float,
        default=math.inf,
        help="Requests a second, Poisson arrivals; inf sends all at once",
    )
    group.add_argument(
        "--max-concurrency", type=int, help="Requests in flight at most; no limit if not given"
    )
    group.add_argument(
        "--warmup-requests", type=int, default=1, help="Short requests before the measured ones"
    )
    group.add_argument(
        "--flush-cache", action="store_true", help="Empty the server's prefix cache after warm-up"
    )


def _add_output_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--output-file", metavar="FILE.jsonl", help="Append the figures to this file"
    )
    group.add_argument(
        "--output-details",
        action="store_true",
        help="Write lengths, times, texts and errors of every request, too",
    )
    group.add_argument("--disable-tqdm", action="store_true", help="Show no progress bar")
    group.add_argument("--tag", help="Word to find the run by in the output file")


def read_options(argv: Sequence[str] | None = None) -> ServingOptions:
    """Options of a command line. Unknown words print usage and exit with 2. Raises: BenchError."""
    args = build_parser().parse_args(argv)
    given = vars(args)
    port = args.port if args.port is not None else BACKENDS[args.backend].port
    check_range("--port", port, PORTS)
    same = {
        name: given[name]
        for name in ServingOptions.__dataclass_fields__
        if name in given and name not in ("base_url", "extra_request_body")
    }
    options = ServingOptions(
        **same,
        base_url=(args.base_url or f"http://{args.host}:{port}").rstrip("/"),
        lengths=LengthOptions(**{name: given[name] for name in LengthOptions.__dataclass_fields__}),
        extra_request_body=_json_object(args.extra_request_body),
        headers=_headers(args.header),
    )
    options.check()
    return options


def _json_object(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise BenchError(f"--extra-request-body {text}: is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise BenchError(f'--extra-request-body {text}: must be an object such as {{"top_k": 1}}')
    return value


def _headers(pairs: Sequence[str]) -> dict[str, str]:
    headers = {}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    for pair in pairs:
        name, is_pair, value = pair.partition("=")
        if not is_pair or not name:
            raise BenchError(f"--header {pair}: write NAME=VALUE")
        headers[name] = value
    return headers


def _check_output_file(path: str | None) -> None:
    """Find out before the run that the result can be kept."""
    if path is None:
        return
    try:
        with Path(path).open("a", encoding="utf-8"):
            return
    except OSError as error:
        raise BenchError(f"--output-file {path}: cannot be written ({error.strerror})") from error


def _allow_many_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_OPEN_FILES if hard == resource.RLIM_INFINITY else min(WANTED_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def run_benchmark(options: ServingOptions) -> dict[str, Any]:
    """Run one benchmark; print its table, append to its output file, return the figures.

    Raises: BenchError if it cannot run or no request succeeds.
    """
    options.check()
    _check_output_file(options.output_file)
    _allow_many_connections()
    figures = asyncio.run(run_serving_benchmark(options))
    print(table(figures), flush=True)
    if figures["failed"]:
        note(f"{figures['failed']} requests failed and are left out of every figure")
    if options.output_file is not None:
        with Path(options.output_file).open("a", encoding="utf-8") as out:
            out.write(json.dumps(figures) + "\n")
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. 0 if requests succeeded, 1 if the run failed, 2 for bad options."""
    try:
        options = read_options(argv)
    except BenchError as error:
        note(f"error: {error}")
        return 2
    try:
        run_benchmark(options)
    except BenchError as error:
        note(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
