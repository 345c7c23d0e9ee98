"""What the front end knows of a request from its arrival to its last token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from sglang.srt.managers.detokenizer_manager import DetokenizerState
from sglang.srt.managers.errors import RequestError
from sglang.srt.managers.io_struct import FinishReason, TokenLogprob, TokenOutput
from sglang.srt.sampling.sampling_params import SamplingParams


@dataclass
class GenerateReqInput:
    """One sequence to generate, before tokenization: exactly one of `text` and `input_ids`.

    prompt_field  the client's name of the prompt, for error messages
    field_names   native sampling name -> the client's name, where they differ
    is_probe      a request of the server's own, which metrics and log leave out
    grammar_after text of the answer after which the grammar begins; None: at once
    """

    rid: str
    sampling_params: SamplingParams
    text: str | None = None
    input_ids: list[int] | None = None
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] | None = None
    priority: int = 0
    stream: bool = False
    return_state_digest: bool = False
    echo: bool = False
    add_special_tokens: bool = True
    prompt_field: str = "text"
    field_names: dict[str, str] = field(default_factory=dict)
    grammar_after: str | None = None
    is_probe: bool = False


class ReqState:
    """One sequence: its ids, text, log probabilities and counters so far."""

    def __init__(
        self,
        *,
        rid: str,
        index: int,
        prompt_ids: list[int],
        detokenizer: DetokenizerState,
        field_names: dict[str, str] | None = None,
    ) -> None:
        self.rid = rid
        self.index = index
        self.field_names = field_names or {}
        self.prompt_ids = prompt_ids
        self.scoring_only = False
        self.is_probe = False
        self.detokenizer = detokenizer
        self.output_ids: list[int] = []
        self.step_lengths: list[int] = []
        self.output_logprobs: list[TokenLogprob] = []
        self.input_logprobs: list[TokenLogprob] = []
        self.prompt_tokens = len(prompt_ids)
        self.cached_tokens = 0
        self.spec_verify_ct = 0
        self.spec_accepted_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.state_digest: str | None = None
        self.error: RequestError | None = None
        self.created = time.monotonic()
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.finished_at: float | None = None

    @property
    def is_done(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def text(self) -> str:
        return self.detokenizer.text

    @property
    def completion_tokens(self) -> int:
        """Ids delivered."""
        return len(self.output_ids)

    @property
    def e2e_latency_s(self) -> float:
        return (self.finished_at or time.monotonic()) - self.created

    @property
    def spec_accept_length(self) -> float | None:
        """Tokens per verify step; None before the first."""
        return self.spec_accepted_tokens / self.spec_verify_ct if self.spec_verify_ct else None

    @property
    def spec_delivered_tokens(self) -> int:
        """Of the ids that verify steps accepted, those that are part of the answer: a step may go past
        its end, and the first id comes from the prompt's own step."""
        return min(self.spec_accepted_tokens, max(0, self.completion_tokens - 1))

    def update(self, out: TokenOutput) -> None:
        """Take over one output of the scheduler."""
        self.prompt_tokens = out.prompt_tokens or self.prompt_tokens
        self.cached_tokens = out.cached_tokens
        self.spec_verify_ct = out.spec_verify_ct
        self.spec_accepted_tokens = out.spec_accepted_tokens
        self.state_digest = out.state_digest
        if out.input_logprobs:
            self.input_logprobs.extend(out.input_logprobs)
        if self.scoring_only:
            self._update_scoring(out)
            return
        self.output_ids.extend(out.new_token_ids)
        if out.new_token_ids:
            self.step_lengths.append(len(out.new_token_ids))
        if out.output_logprobs:
            self.output_logprobs.extend(out.output_logprobs)
        self.detokenizer.push(out.new_token_ids, out.finish_reason)
        self.finish_reason = out.finish_reason

    def _update_scoring(self, out: TokenOutput) -> None:
        """`max_new_tokens` 0 runs as 1, because the last prompt row yields a token anyway; the
        token is not delivered."""
        if out.finish_reason is not None:
            ended = out.finish_reason
            self.finish_reason = ended if ended.type == "abort" else FinishReason("length", 0)


class RequestGroup:
    """The sequences of one user request; waits for news of any of them.

    Use as a context manager: leaving it aborts what has not ended.
    """

    def __init__(
        self, rid: str, states: list[ReqState], *, abandon: Callable[[RequestGroup], None]
    ) -> None:
        self.rid = rid
        self.states = states
        self._abandon = abandon
        self._news: dict[int, ReqState] = {}
        self._waiter: asyncio.Future[None] | None = None

    def __enter__(self) -> RequestGroup:
        return self

    def __exit__(self, *exc: object) -> None:
        self._abandon(self)

    @property
    def is_done(self) -> bool:
        return all(state.is_done for state in self.states)

    def notify(self, state: ReqState) -> None:
        """`state` has something new."""
        self._news[state.index] = state
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next_news(self) -> list[ReqState]:
        """States that changed since the last call; [] once all have ended and were returned.

        Raises: RequestError if the server cannot finish one of them.
        """
        if not self._news:
            if self.is_done:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        news = list(self._news.values())
        self._news.clear()
        for state in news:
            if state.error is not None:
                raise state.error
        return news

    async def finish(self) -> list[ReqState]:
        """Wait for the end of all. Raises: as `next_news`."""
        while await self.next_news():
            pass
        return self.states
