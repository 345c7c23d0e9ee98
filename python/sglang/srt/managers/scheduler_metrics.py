"""Counters and log lines of the scheduler."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from sglang.srt.managers.io_struct import SchedulerStats
from sglang.srt.managers.schedule_batch import PrefillPlan, Req, StepResult
from sglang.srt.mem_cache.request_memory import RequestMemory

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

logger = logging.getLogger(__name__)


class SchedulerMetrics:
    """Counts what was done since start; reads pools, changes nothing.

    verify_scratch_bytes, lossless_bytes_freed  from the memory plan
    """

    def __init__(
        self,
        memory: RequestMemory,
        *,
        decode_log_interval: int,
        max_total_num_tokens: int,
        draft_token_num: int,
        verify_scratch_bytes: int,
        lossless_bytes_freed: int,
        is_lossless: bool,
    ) -> None:
        self._memory = memory
        self._decode_log_interval = decode_log_interval
        self._max_total_num_tokens = max_total_num_tokens
        self._draft_token_num = draft_token_num
        self._verify_scratch_bytes = verify_scratch_bytes
        self._lossless_bytes_freed = lossless_bytes_freed
        self._is_lossless = is_lossless
        self.num_finished = 0
        self.num_aborted = 0
        self.num_retracted = 0
        self.verify_ct = 0
        self.correct_ct = 0
        self.drafted_ct = 0
        self.replayed_steps = 0
        self.decode_steps = 0
        self.gen_throughput = 0.0
        self._window_start = time.monotonic()
        self._window_tokens = 0
        self._window_verify_ct = 0
        self._window_correct_ct = 0
        self._window_drafted_ct = 0
        self.reset_cache_counters()

    def reset_cache_counters(self) -> None:
        self.cache_hit_tokens = 0
        self.cache_lookup_tokens = 0

    def note_admission(self, req: Req) -> None:
        if req.queue_time_s is None:
            req.queue_time_s = time.monotonic() - req.arrival
        self.cache_hit_tokens += req.kv.cached_len
        self.cache_lookup_tokens += req.num_tokens

    def note_prefill(
        self, scheduler: Scheduler, plan: PrefillPlan, admitted: list[Req], seconds: float
    ) -> None:
        logger.info(
            "Prefill batch, #new-seq: %d, #new-token: %d, #cached-token: %d, token usage: %.2f, "
            "#running-req: %d, #queue-req: %d, input throughput (token/s): %.2f",
            len(admitted),
            plan.num_tokens,
            sum(r.kv.cached_len for r in admitted),
            self._token_usage(),
            len(scheduler.running),
            len(scheduler.waiting),
            plan.num_tokens / max(seconds, 1e-9),
        )

    def note_decode(self, scheduler: Scheduler, reqs: list[Req], result: StepResult) -> None:
        self.decode_steps += 1
        self._window_tokens += sum(len(ids) for ids in result.token_ids)
        if self._draft_token_num > 1:
            correct = sum(result.committed) - len(reqs)
            self.verify_ct += len(reqs)
            self.correct_ct += correct
            self.drafted_ct += len(reqs) * result.num_drafts
            self._window_verify_ct += len(reqs)
            self._window_correct_ct += correct
            self._window_drafted_ct += len(reqs) * result.num_drafts
            if self._is_lossless:
                self.replayed_steps += sum(result.committed)
        if self.decode_steps % self._decode_log_interval == 0:
            self._log_decode(scheduler, len(reqs))

    def _log_decode(self, scheduler: Scheduler, num_running: int) -> None:
        now = time.monotonic()
        self.gen_throughput = self._window_tokens / max(now - self._window_start, 1e-9)
        spec = ""
        if self._window_verify_ct:
            mean = self._window_correct_ct / self._window_verify_ct
            rate = self._window_correct_ct / max(1, self._window_drafted_ct)
            spec = f"accept len: {mean + 1:.2f}, accept rate: {rate:.2f}, "
        logger.info(
            "Decode batch, #running-req: %d, #token: %d, token usage: %.2f, state usage: %.2f, "
            "%sgen throughput (token/s): %.2f, #queue-req: %d",
            num_running,
            self._num_used_tokens(),
            self._token_usage(),
            self._state_usage(),
            spec,
            self.gen_throughput,
            len(scheduler.waiting),
        )
        self._window_start, self._window_tokens = now, 0
        self._window_verify_ct = self._window_correct_ct = self._window_drafted_ct = 0

    def note_resume(self) -> None:
        """Work has arrived after a pause, which the next decode line must not count."""
        self._window_start, self._window_tokens = time.monotonic(), 0

    def accept_length(self) -> float:
        """Mean tokens per verify, bonus included; 0 before the first verify."""
        return 1 + self.correct_ct / self.verify_ct if self.verify_ct else 0.0

    def accept_rate(self) -> float:
        return self.correct_ct / self.drafted_ct if self.drafted_ct else 0.0

    def stats(self, scheduler: Scheduler) -> SchedulerStats:
        lookups = self.cache_lookup_tokens
        return SchedulerStats(
            num_running_reqs=len(scheduler.running) + len(scheduler.prefilling),
            num_queue_reqs=len(scheduler.waiting),
            num_used_tokens=self._num_used_tokens(),
            max_total_num_tokens=self._max_total_num_tokens,
            token_usage=self._token_usage(),
            mamba_usage=self._state_usage(),
            gen_throughput=self.gen_throughput,
            cache_hit_rate=self.cache_hit_tokens / lookups if lookups else 0.0,
            spec_accept_length=self.accept_length(),
            spec_accept_rate=self.accept_rate(),
            verify_scratch_bytes=self._verify_scratch_bytes,
            lossless_bytes_freed=self._lossless_bytes_freed,
            replayed_steps_ct=self.replayed_steps,
            num_retracted_ct=self.num_retracted,
        )

    def internal_state(self, scheduler: Scheduler) -> dict:
        """Figures for server info, JSON-compatible."""
        return {
            "avg_spec_accept_length": self.accept_length() or None,
            "spec_verify_ct": self.verify_ct,
            "last_gen_throughput": self.gen_throughput,
            "num_running_reqs": len(scheduler.running) + len(scheduler.prefilling),
            "num_queue_reqs": len(scheduler.waiting),
            "num_retracted": self.num_retracted,
            "replayed_steps": self.replayed_steps,
        }

    def _num_used_tokens(self) -> int:
        return self._max_total_num_tokens - self._memory.available_tokens()

    def _state_usage(self) -> float:
        """Share of the state slots that running requests hold."""
        stats = self._memory.stats()
        return stats["states_used"] / max(1, stats["states_total"])

    def _token_usage(self) -> float:
        return self._num_used_tokens() / max(1, self._max_total_num_tokens)
