"""Which waiting requests run next, and how many tokens of them."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

from sglang.srt.managers.schedule_batch import PrefillChunk, Req
from sglang.srt.mem_cache.request_memory import RequestMemory

CLIP_NEW_TOKENS = 4096
"""Output tokens counted for a request at admission at most; a guess that retraction corrects."""
NEW_TOKEN_RATIO = 0.4
"""Share of the remaining output that admission reserves for running requests; a guess."""
PLANS_BETWEEN_MATCHES = 8
"""A refused request is matched again after so many plans; a match of 26k tokens takes 1 ms of a step."""


@dataclass(frozen=True)
class Refusal:
    """Why the request at the head of the queue did not fit: tokens it needed, and in which plan."""

    rid: str
    fresh: int
    plan_ct: int


def _by_arrival(req: Req) -> tuple[float, float]:
    return -req.priority, req.arrival


class PrefillPolicy:
    """Chooses prefill chunks under the token budget; admission is all or nothing per request.

    schedule_policy  "fcfs": arrival order; "lpm": longest cached prefix first. Requests of a higher
                     ``priority`` come first in both.
    """

    def __init__(
        self,
        memory: RequestMemory,
        *,
        schedule_policy: str,
        chunk_tokens: int,
        max_prefill_tokens: int,
        max_running_requests: int,
        conservativeness: float,
        draft_token_num: int,
    ) -> None:
        self._memory = memory
        self._schedule_policy = schedule_policy
        self._chunk_tokens = chunk_tokens
        self._max_prefill_tokens = max_prefill_tokens
        self._max_running_requests = max_running_requests
        self._ratio = min(1.0, NEW_TOKEN_RATIO * conservativeness)
        self._draft_token_num = draft_token_num
        self._plan_ct = 0
        self._refusal: Refusal | None = None

    def order(self, waiting: list[Req]) -> None:
        """Sort the queue in place; changes nothing else."""
        if self._schedule_policy == "lpm":
            cached = {
                r.rid: self._memory.match(r.token_ids(), r.match_limit()).cached_len
                for r in waiting
            }
            waiting.sort(key=lambda r: (-r.priority, -cached[r.rid], r.arrival))
        else:
            waiting.sort(key=_by_arrival)

    def add(self, waiting: list[Req], req: Req) -> None:
        """Put a request into an ordered queue, where `order` would; thousands may wait."""
        if self._schedule_policy == "lpm":
            waiting.append(req)
            self.order(waiting)
        else:
            bisect.insort(waiting, req, key=_by_arrival)

    def plan(
        self, waiting: list[Req], prefilling: list[Req], running: list[Req]
    ) -> tuple[list[PrefillChunk], list[Req]]:
        """Return this step's chunks and the requests newly admitted by them.

        A request whose chunk does not fit the pools stays where it is; nothing is half allocated.
        """
        self._plan_ct += 1
        budget = min(self._max_prefill_tokens, self._chunk_tokens)
        chunks: list[PrefillChunk] = []
        admitted: list[Req] = []
        for req in prefilling:
            if budget <= 0:
                return chunks, admitted
            chunk = self._next_chunk(req, budget)
            if chunk is not None:
                chunks.append(chunk)
                budget -= chunk.end - chunk.start
        slots_left = self._max_running_requests - len(running) - len(prefilling)
        reserved = self._reserve(running) + self._reserve(prefilling)
        for req in waiting:
            if budget <= 0 or len(admitted) >= slots_left:
                break
            chunk = self._admit(req, budget, reserved)
            if chunk is None:
                break
            admitted.append(req)
            chunks.append(chunk)
            budget -= chunk.end - chunk.start
            reserved += self._reserve([req])
        return chunks, admitted

    def _next_chunk(self, req: Req, budget: int) -> PrefillChunk | None:
        token_ids = req.token_ids()
        start = req.kv.committed_len
        end = min(len(token_ids), start + budget)
        if not self._memory.ensure(req, end):
            return None
        slot, rows = self._memory.track_rows_for_extend(req, start, end)
        return PrefillChunk(req, start, end, token_ids, slot, rows)

    def _admit(self, req: Req, budget: int, reserved: int) -> PrefillChunk | None:
        if self._is_still_short(req, reserved):
            return None
        token_ids = req.token_ids()
        limit = req.match_limit()
        match = self._memory.match(token_ids, limit)
        fresh = len(token_ids) - match.usable_len
        if reserved and self._memory.available_tokens() < fresh + reserved + self._tail(req):
            self._refusal = Refusal(req.rid, fresh, self._plan_ct)
            return None
        num_new = min(budget, fresh)
        if not self._memory.admit(req, token_ids=token_ids, num_new_tokens=num_new, limit=limit):
            return None
        start = req.kv.committed_len
        end = start + num_new
        if not req.output_ids:
            req.cached_tokens = req.kv.cached_len
        slot, rows = self._memory.track_rows_for_extend(req, start, end)
        return PrefillChunk(req, start, end, token_ids, slot, rows)

    def _is_still_short(self, req: Req, reserved: int) -> bool:
        """Whether what was found at the last refusal of ``req`` is fresh and still too much."""
        last = self._refusal
        if not reserved or last is None or last.rid != req.rid:
            return False
        if self._plan_ct - last.plan_ct >= PLANS_BETWEEN_MATCHES:
            return False
        return self._memory.available_tokens() < last.fresh + reserved + self._tail(req)

    def _tail(self, req: Req) -> int:
        ahead = int(min(req.remaining_new_tokens, CLIP_NEW_TOKENS) * self._ratio)
        return ahead + self._draft_token_num

    def _reserve(self, reqs: Iterable[Req]) -> int:
        """Tokens that requests already admitted are expected to need still."""
        return sum(
            max(0, r.num_tokens + self._tail(r) - r.kv.allocated_len)
            if r.kv.allocated_len
            else r.num_tokens + self._tail(r)
            for r in reqs
        )
