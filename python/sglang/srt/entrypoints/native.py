"""SGLang's own routes: /generate and what it shares with the offline Engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from sglang.srt.entrypoints.front_end import FrontEnd
from sglang.srt.entrypoints.http_io import id_keys
from sglang.srt.entrypoints.openai.errors import error_event
from sglang.srt.entrypoints.openai.logprobs import finite
from sglang.srt.managers.errors import RequestError
from sglang.srt.managers.request_state import GenerateReqInput, ReqState
from sglang.srt.managers.tokenizer_manager import new_rid
from sglang.srt.speculative.simulated_info import simulated_info

DEFAULT_MAX_NEW_TOKENS = 128
MAX_SEQUENCES = 4096


class GenerateRequest(msgspec.Struct, kw_only=True):
    """POST /generate. One of `text` and `input_ids`, each single or a list; options that differ
    between the entries of a list are lists of the same length."""

    text: str | list[str] | None = None
    input_ids: Any = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] = False
    logprob_start_len: int | list[int] = -1
    top_logprobs_num: int | list[int] = 0
    token_ids_logprob: Any = None
    return_text_in_logprobs: bool = False
    stream: bool = False
    return_state_digest: bool = False
    return_step_lengths: bool = False
    priority: int = 0
    model: str | None = None


@dataclass
class GenerateJob:
    """One checked request. `is_list`: the reply is a list, also for one entry."""

    request: GenerateRequest
    rid: str
    inputs: list[GenerateReqInput]
    is_list: bool


class NativeServing:
    """Runs native requests on a front end."""

    def __init__(self, front_end: FrontEnd) -> None:
        self._front = front_end
        self._manager = front_end.manager

    def prepare(self, request: GenerateRequest, *, rid: str | None = None) -> GenerateJob:
        """Check a request. Raises: RequestError 400 naming the field."""
        texts, ids, is_list = self._prompts(request)
        num_prompts = len(texts or ids or ())
        given = _spread(request.sampling_params or {}, num_prompts, "sampling_params")
        rids = _spread(request.rid, num_prompts, "rid")
        if isinstance(request.rid, str) and num_prompts > 1:
            rids = [f"{request.rid}-{at}" for at in range(num_prompts)]
        wants = _spread(request.return_logprob, num_prompts, "return_logprob")
        starts = _spread(request.logprob_start_len, num_prompts, "logprob_start_len")
        tops = _spread(request.top_logprobs_num, num_prompts, "top_logprobs_num")
        selected = self._selected(request.token_ids_logprob, num_prompts)
        group_rid = request.rid if isinstance(request.rid, str) else rid or new_rid()
        inputs: list[GenerateReqInput] = []
        for at in range(num_prompts):
            values = {"max_new_tokens": DEFAULT_MAX_NEW_TOKENS, **_without_nulls(given[at])}
            if isinstance(values.get("logit_bias"), dict):
                values["logit_bias"] = id_keys(values["logit_bias"], "logit_bias")
            params = self._manager.sampling_params(values)
            if not 1 <= params.n <= MAX_SEQUENCES:
                raise RequestError(f"n must be in [1, {MAX_SEQUENCES}], got {params.n}", param="n")
            own_rid = rids[at] or (group_rid if num_prompts == 1 else new_rid())
            for choice in range(params.n):
                own = params
                if params.n > 1 and params.sampling_seed is not None:
                    own = msgspec.structs.replace(
                        params, sampling_seed=params.sampling_seed + choice
                    )
                inputs.append(
                    GenerateReqInput(
                        rid=own_rid if params.n == 1 else f"{own_rid}-{choice}",
                        sampling_params=own,
                        text=texts[at] if texts is not None else None,
                        input_ids=ids[at] if ids is not None else None,
                        return_logprob=wants[at],
                        logprob_start_len=starts[at],
                        top_logprobs_num=tops[at],
                        token_ids_logprob=selected[at],
                        priority=request.priority,
                        stream=request.stream,
                        return_state_digest=request.return_state_digest,
                        prompt_field="text" if texts is not None else "input_ids",
                    )
                )
        return GenerateJob(request, group_rid, inputs, is_list or len(inputs) > 1)

    def _prompts(
        self, request: GenerateRequest
    ) -> tuple[list[str] | None, list[list[int]] | None, bool]:
        if (request.text is None) == (request.input_ids is None):
            raise RequestError("give exactly one of text and input_ids", param="text")
        if request.text is not None:
            is_list = isinstance(request.text, list)
            texts = request.text if isinstance(request.text, list) else [request.text]
            if not texts:
                raise RequestError("text is an empty list", param="text")
            return texts, None, is_list
        ids = request.input_ids
        if _is_ids(ids):
            return None, [ids], False
        if isinstance(ids, list) and ids and all(_is_ids(item) for item in ids):
            return None, ids, True
        raise RequestError(
            "input_ids must be a list of token ids, or a non-empty list of such lists",
            param="input_ids",
        )

    def _selected(self, given: Any, num_prompts: int) -> list[list[int] | None]:
        if given is None or _is_ids(given):
            return [given] * num_prompts
        if isinstance(given, list) and len(given) == num_prompts:
            if all(item is None or _is_ids(item) for item in given):
                return given
        raise RequestError(
            "token_ids_logprob must be a list of token ids, or one such list for each prompt",
            param="token_ids_logprob",
        )

    async def answer(self, job: GenerateJob) -> dict[str, Any] | list[dict[str, Any]]:
        """The reply once all sequences have ended."""
        with await self._manager.start(job.rid, job.inputs) as group:
            states = await group.finish()
        replies = [self.reply(job, state) for state in states]
        return replies if job.is_list else replies[0]

    async def updates(self, job: GenerateJob) -> AsyncGenerator[dict[str, Any], None]:
        """Replies with the text so far; those of a list carry their `index`."""
        with await self._manager.start(job.rid, job.inputs) as group:
            while news := await group.next_news():
                for state in news:
                    reply = self.reply(job, state)
                    if job.is_list:
                        reply["index"] = state.index
                    yield reply

    async def stream(self, job: GenerateJob) -> AsyncGenerator[bytes, None]:
        """Server-sent events of `updates`; an error after the first becomes an event."""
        started = False
        updates = self.updates(job)
        try:
            async for reply in updates:
                started = True
                yield b"data: " + orjson.dumps(reply) + b"\n\n"
        except RequestError as error:
            if not started:
                raise
            yield error_event(error)
        finally:
            await updates.aclose()
        yield b"data: [DONE]\n\n"

    def reply(self, job: GenerateJob, state: ReqState) -> dict[str, Any]:
        """One sequence as it stands."""
        meta: dict[str, Any] = {
            "id": state.rid,
            "finish_reason": finish_object(state),
            "prompt_tokens": state.prompt_tokens,
            "completion_tokens": state.completion_tokens,
            "cached_tokens": state.cached_tokens,
            "e2e_latency": state.e2e_latency_s,
            "spec_verify_ct": state.spec_verify_ct,
        }
        if state.spec_accept_length is not None:
            meta["spec_accept_length"] = state.spec_accept_length
            meta["spec_accept_token_num"] = state.spec_delivered_tokens
            meta.update(simulated_info())
        if job.request.return_step_lengths:
            meta["step_lengths"] = list(state.step_lengths)
        if state.state_digest is not None:
            meta["state_digest"] = state.state_digest
        if job.inputs[state.index].return_logprob:
            meta.update(self._logprob_meta(job, state))
        return {"text": state.text, "output_ids": list(state.output_ids), "meta_info": meta}

    def _logprob_meta(self, job: GenerateJob, state: ReqState) -> dict[str, Any]:
        obj = job.inputs[state.index]
        with_text = job.request.return_text_in_logprobs
        meta: dict[str, Any] = {}
        sides = (("input", state.input_logprobs), ("output", state.output_logprobs))
        for side, positions in sides:
            meta[f"{side}_token_logprobs"] = [
                self._triple(p.logprob, p.token_id, with_text) for p in positions
            ]
            if obj.top_logprobs_num:
                meta[f"{side}_top_logprobs"] = [self._triples(p.top, with_text) for p in positions]
            if obj.token_ids_logprob is not None:
                meta[f"{side}_token_ids_logprobs"] = [
                    self._triples(p.selected, with_text) for p in positions
                ]
        return meta

    def _triples(
        self, pairs: list[tuple[float, int]] | None, with_text: bool
    ) -> list[list[Any]] | None:
        if pairs is None:
            return None
        return [self._triple(value, token_id, with_text) for value, token_id in pairs]

    def _triple(self, value: float | None, token_id: int, with_text: bool) -> list[Any]:
        text = self._front.tokenizer.token_text(token_id) if with_text else None
        return [None if value is None else finite(value), token_id, text]


def finish_object(state: ReqState) -> dict[str, Any] | None:
    """SGLang's finish_reason: `{type, matched}`, `{type, length}` or `{type, message}`."""
    reason = state.finish_reason
    if reason is None:
        return None
    if reason.type == "stop":
        return {"type": "stop", "matched": reason.matched}
    if reason.type == "length":
        return {"type": "length", "length": state.completion_tokens}
    return {
        "type": reason.type,
        "message": reason.message or "",
        "status_code": reason.status_code,
        "err_type": None,
    }


def _without_nulls(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _spread(value: Any, count: int, name: str) -> list[Any]:
    """One value for each prompt."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise RequestError(
            f"{name} has {len(value)} entries for {count} prompts; give one for each, or a single "
            "value",
            param=name,
        )
    return value
