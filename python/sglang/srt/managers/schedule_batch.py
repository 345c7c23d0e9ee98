"""What the scheduler knows of a request, and the two kinds of step it can ask for."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

from sglang.srt.constrained.grammar_state import GrammarState
from sglang.srt.managers.finish import StopChecker
from sglang.srt.managers.io_struct import FinishReason
from sglang.srt.mem_cache.req_kv import ReqKV
from sglang.srt.sampling.sampling_batch import SamplingState


@dataclass(eq=False)
class Req:
    """One request from admission to its last token; owned by the scheduler.

    ``origin_input_ids`` is the prompt. ``output_ids`` holds what was sampled; its last entry is the
    *bonus*: it has been emitted, but its KV and state do not exist yet. ``kv`` is what the request
    holds in the pools; only RequestMemory writes it, except ``committed_len``, which the scheduler
    advances when a step is final. ``num_in_flight`` counts launched steps whose tokens are not known yet.
    """

    rid: str
    origin_input_ids: list[int]
    sampling: SamplingState
    stop: StopChecker
    max_new_tokens: int
    priority: int = 0
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] | None = None
    return_state_digest: bool = False
    grammar: GrammarState | None = None
    arrival: float = field(default_factory=time.monotonic)

    kv: ReqKV = field(default_factory=ReqKV)
    output_ids: list[int] = field(default_factory=list)
    num_sent: int = 0
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    queue_time_s: float | None = None
    num_retractions: int = 0
    spec_verify_ct: int = 0
    spec_correct_ct: int = 0
    num_in_flight: int = 0
    output_logprobs: list = field(default_factory=list)
    input_logprobs: list = field(default_factory=list)

    @property
    def req_pool_idx(self) -> int | None:
        """Request row while the request holds memory."""
        return self.kv.req_pool_idx

    @property
    def num_tokens(self) -> int:
        return len(self.origin_input_ids) + len(self.output_ids)

    @property
    def remaining_new_tokens(self) -> int:
        return self.max_new_tokens - len(self.output_ids)

    @property
    def edits_logits(self) -> bool:
        """Whether anything changes the model's logits before a token is chosen."""
        return self.grammar is not None or self.sampling.edits_logits

    def token_ids(self) -> list[int]:
        """Prompt and output, the bonus included."""
        return self.origin_input_ids + self.output_ids

    def append(self, token_ids: list[int]) -> int:
        """Append sampled tokens until a finish rule holds; return how many were kept."""
        for count, token in enumerate(token_ids):
            is_complete = self.grammar is not None and self.grammar.advance(token)
            if self.grammar is not None and self.grammar.fault is not None:
                self.finish_reason = FinishReason(
                    type="abort", message=self.grammar.fault, status_code=400
                )
                return count
            self.output_ids.append(token)
            self.finish_reason = self.stop.check(self.output_ids, self.max_new_tokens)
            if is_complete and (self.finish_reason is None or self.finish_reason.type != "stop"):
                self.finish_reason = FinishReason(type="stop")
            if self.finish_reason is not None:
                return count + 1
        return len(token_ids)

    def match_limit(self) -> int:
        """How many leading tokens may come from the prefix cache.

        At least one row must be computed, and rows whose prompt log probabilities are asked for
        must be computed too.
        """
        limit = self.num_tokens - 1
        if self.return_logprob and self.logprob_start_len >= 0 and not self.output_ids:
            limit = min(limit, max(0, self.logprob_start_len - 1))
        return limit


@dataclass
class PrefillChunk:
    """Rows ``start .. end-1`` of one request; ``is_last`` when the next token is sampled after it."""

    req: Req
    start: int
    end: int
    token_ids: list[int]
    track_slot: int = -1
    track_rows: int = -1

    @property
    def is_last(self) -> bool:
        return self.end == len(self.token_ids)

    @property
    def next_token(self) -> int | None:
        """The prompt token after the chunk, or None when it has to be sampled."""
        return None if self.is_last else self.token_ids[self.end]


@dataclass
class PrefillPlan:
    chunks: list[PrefillChunk]

    @property
    def num_tokens(self) -> int:
        return sum(c.end - c.start for c in self.chunks)


@dataclass
class DecodePlan:
    """One decode or verify step of ``reqs``; pages for ``draft_token_num`` positions are reserved."""

    reqs: list[Req]
    draft_token_num: int
    track_slots: list[int]


class PendingStep(Protocol):
    """A step that was launched; ``result`` waits for what it produced."""

    def result(self) -> StepResult: ...


@dataclass
class StepResult:
    """What a step produced, per request of its plan, in the plan's order.

    ``token_ids[i]``  new tokens of request i (empty after a non-final prefill chunk)
    ``committed[i]``  how many of the rows of this step became final
    ``tracked[i]``    length of the boundary state that was stored, or -1
    ``logprobs[i]``   per new token ``(logprob, top [(logprob, id)], chosen ids [(logprob, id)])``, or None
    ``input_logprobs[i]``  the same for prompt rows of a prefill chunk, or None
    ``num_drafts``    drafts that the step verified for each request
    """

    token_ids: list[list[int]]
    committed: list[int]
    tracked: list[int]
    logprobs: list[list | None]
    input_logprobs: list[list | None]
    num_drafts: int = 0

    def result(self) -> StepResult:
        """A step that is over by the time it is returned."""
        return self

    def of(self, index: list[int]) -> StepResult:
        """What it produced for some of its requests."""
        return StepResult(
            token_ids=[self.token_ids[i] for i in index],
            committed=[self.committed[i] for i in index],
            tracked=[self.tracked[i] for i in index],
            logprobs=[self.logprobs[i] for i in index],
            input_logprobs=[self.input_logprobs[i] for i in index],
            num_drafts=self.num_drafts,
        )
