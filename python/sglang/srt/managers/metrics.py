"""Prometheus figures of a server, kept in the front-end process."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from sglang.srt.managers.io_struct import SchedulerStats

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_GAUGES = {
    "num_running_reqs": "Requests that decode or prefill now",
    "num_queue_reqs": "Requests that wait for admission",
    "num_used_tokens": "KV slots in use",
    "max_total_num_tokens": "KV slots in the pool",
    "token_usage": "Part of the KV slots in use, 0..1",
    "mamba_usage": "Part of the recurrent-state slots in use, 0..1",
    "gen_throughput": "Generated tokens per second over the last interval",
    "cache_hit_rate": "Part of recent prompt tokens found in the prefix cache, 0..1",
    "spec_accept_length": "Tokens per verify step since start, bonus included",
    "spec_accept_rate": "Part of the drafted tokens that was accepted since start, 0..1",
    "verify_scratch_bytes": "Bytes of the verify scratch",
    "lossless_bytes_freed": "Bytes that lossless verify saves against snapshots",
}
_STAT_COUNTERS = {
    "replayed_steps_ct": ("replayed_steps", "Draft steps replayed by lossless commits"),
    "num_retracted_ct": (
        "num_retracted_requests",
        "Times a running request went back to the queue",
    ),
}
_COUNTERS = {
    "prompt_tokens": "Prompt tokens of started requests",
    "generation_tokens": "Tokens generated",
    "cached_tokens": "Prompt tokens taken from the prefix cache",
    "num_requests": "Requests that ended",
    "num_aborted_requests": "Requests that ended early",
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": "From arrival to the first token",
    "inter_token_latency_seconds": "Between two tokens of one request",
    "e2e_request_latency_seconds": "From arrival to the last token",
    "queue_time_seconds": "From arrival to admission",
}


class ServerMetrics:
    """One registry with the `sglang:` names; every metric carries the label `model_name`."""

    def __init__(self, model_name: str) -> None:
        self._registry = registry = CollectorRegistry()
        labels = ["model_name"]
        self._gauges = {
            name: Gauge(f"sglang:{name}", text, labels, registry=registry).labels(model_name)
            for name, text in _GAUGES.items()
        }
        self._counters = {
            name: Counter(f"sglang:{name}", text, labels, registry=registry).labels(model_name)
            for name, text in {**_COUNTERS, **dict(_STAT_COUNTERS.values())}.items()
        }
        histograms = {
            name: Histogram(
                f"sglang:{name}", text, labels, registry=registry, buckets=_SECONDS
            ).labels(model_name)
            for name, text in _HISTOGRAMS.items()
        }
        self._first_token = histograms["time_to_first_token_seconds"]
        self._inter_token = histograms["inter_token_latency_seconds"]
        self._latency = histograms["e2e_request_latency_seconds"]
        self._queue_time = histograms["queue_time_seconds"]
        self._totals = dict.fromkeys(_STAT_COUNTERS, 0)

    def on_stats(self, stats: SchedulerStats) -> None:
        """Take over the scheduler's gauges and totals."""
        for name, gauge in self._gauges.items():
            gauge.set(getattr(stats, name))
        for field, (name, _) in _STAT_COUNTERS.items():
            total = getattr(stats, field)
            self._counters[name].inc(max(0, total - self._totals[field]))
            self._totals[field] = total

    def on_first_token(
        self, *, seconds: float, queue_seconds: float | None, prompt_tokens: int, cached_tokens: int
    ) -> None:
        self._first_token.observe(seconds)
        if queue_seconds is not None:
            self._queue_time.observe(queue_seconds)
        self._counters["prompt_tokens"].inc(prompt_tokens)
        self._counters["cached_tokens"].inc(cached_tokens)

    def on_tokens(self, num_tokens: int, seconds_each: float | None) -> None:
        """`seconds_each` is None for a request's first tokens."""
        self._counters["generation_tokens"].inc(num_tokens)
        if seconds_each is not None:
            for _ in range(num_tokens):
                self._inter_token.observe(seconds_each)

    def on_end(self, *, seconds: float, aborted: bool) -> None:
        self._counters["num_requests"].inc()
        self._latency.observe(seconds)
        if aborted:
            self._counters["num_aborted_requests"].inc()

    def render(self) -> bytes:
        """Text exposition."""
        return generate_latest(self._registry)
