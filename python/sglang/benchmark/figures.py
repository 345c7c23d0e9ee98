"""Figures of a serving benchmark: computed once, printed as a table, written as one JSON line."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang.benchmark.client import Outcome
from sglang.benchmark.load import LoadResult
from sglang.benchmark.options import ServingOptions

PERCENTILES = (90, 95, 99)
LATENCIES = {
    "e2e_latency": ("End-to-End Latency", "E2E Latency"),
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-Token Latency", "ITL"),
}
_LABEL, _WIDTH = 40, 50


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Value below which ``percent`` of sorted values lie, interpolated; 0 for none."""
    if not ordered:
        return 0.0
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True)
class AcceptCounts:
    """What a server says of its verify steps so far; None where it says nothing."""

    verify_ct: int | None
    mean: float | None

    @classmethod
    def read(cls, server_info: Any) -> AcceptCounts:
        """From an answer of /server_info; all replicas together."""
        states = server_info.get("internal_states") if isinstance(server_info, dict) else None
        rows = [s for s in states or [] if isinstance(s, dict) and s.get("avg_spec_accept_length")]
        if not rows:
            return cls(None, None)
        counts = [int(row.get("spec_verify_ct") or 0) for row in rows]
        if not all(counts):
            return cls(None, statistics.fmean(row["avg_spec_accept_length"] for row in rows))
        total = sum(counts)
        mean = sum(r["avg_spec_accept_length"] * c for r, c in zip(rows, counts)) / total
        return cls(total, mean)

    def since(self, before: AcceptCounts) -> float | None:
        """Mean accept length of the verify steps after ``before``, where both can be counted."""
        if self.mean is None or self.verify_ct is None or before.mean is None:
            return self.mean
        steps = self.verify_ct - (before.verify_ct or 0)
        if steps <= 0:
            return None
        return (self.mean * self.verify_ct - before.mean * (before.verify_ct or 0)) / steps


def compute(
    options: ServingOptions,
    load: LoadResult,
    *,
    retokenized: int | None,
    accept_length: float | None,
    server_info: dict[str, Any] | None,
) -> dict[str, Any]:
    """The run as one flat object: what was asked, counts, rates, latencies in ms, server info.

    retokenized  tokens of all answers' texts by the client's tokenizer, None without one
    """
    done = [o for o in load.outcomes if o.success]
    seconds = max(load.duration_s, 1e-9)
    tokens_in = sum(o.prompt_len for o in done)
    tokens_out = sum(o.output_len for o in done)
    figures: dict[str, Any] = _asked(options)
    figures |= {
        "duration": load.duration_s,
        "completed": len(done),
        "failed": len(load.outcomes) - len(done),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "total_output_tokens_retokenized": retokenized,
        "request_throughput": len(done) / seconds,
        "input_throughput": tokens_in / seconds,
        "output_throughput": tokens_out / seconds,
        "total_throughput": (tokens_in + tokens_out) / seconds,
        "max_output_tokens_per_s": peak_output_rate(done),
        "concurrency": sum(o.latency_s for o in done) / seconds,
        "max_concurrent_requests": peak_concurrency(done),
        "accept_length": accept_length,
    }
    for name, values in _samples(done).items():
        figures |= _spread(name, values)
    figures["max_itl_ms"] = 1000 * max((max(o.itls_s, default=0.0) for o in done), default=0.0)
    figures["tag"] = options.tag
    figures["server_info"] = server_info
    if options.output_details:
        figures |= _details(load.outcomes)
    return figures


def _asked(options: ServingOptions) -> dict[str, Any]:
    own = options.lengths
    return {
        "backend": options.backend,
        "model": options.served_model_name or options.model,
        "dataset_name": options.dataset_name,
        "num_prompts": options.num_prompts,
        "request_rate": "inf" if math.isinf(options.request_rate) else options.request_rate,
        "max_concurrency": options.max_concurrency,
        "seed": options.seed,
        "sharegpt_output_len": own.sharegpt_output_len,
        "random_input_len": own.random_input_len,
        "random_output_len": own.random_output_len,
        "random_range_ratio": own.random_range_ratio,
    }


def _samples(done: Sequence[Outcome]) -> dict[str, list[float]]:
    return {
        "e2e_latency": [o.latency_s for o in done],
        "ttft": [o.ttft_s for o in done],
        "tpot": [
            (o.latency_s - o.ttft_s) / (o.output_len - 1)
            for o in done
            if o.output_len > 1 and o.itls_s
        ],
        "itl": [value for o in done for value in o.itls_s],
    }


def _spread(name: str, seconds: list[float]) -> dict[str, float]:
    ordered = sorted(1000 * value for value in seconds)
    found = {
        f"mean_{name}_ms": statistics.fmean(ordered) if ordered else 0.0,
        f"median_{name}_ms": percentile(ordered, 50),
        f"std_{name}_ms": statistics.pstdev(ordered) if ordered else 0.0,
    }
    return found | {f"p{p}_{name}_ms": percentile(ordered, p) for p in PERCENTILES}


def _details(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {
        "input_lens": [o.prompt_len for o in outcomes],
        "output_lens": [o.output_len for o in outcomes],
        "latencies": [o.latency_s for o in outcomes],
        "ttfts": [o.ttft_s for o in outcomes],
        "itls": [o.itls_s for o in outcomes],
        "generated_texts": [o.text for o in outcomes],
        "errors": [o.error for o in outcomes],
    }


def peak_concurrency(outcomes: Sequence[Outcome]) -> int:
    """Most requests that were under way at the same time."""
    changes = [(o.start_s, 1) for o in outcomes]
    changes += [(o.start_s + o.latency_s, -1) for o in outcomes]
    running = peak = 0
    for _, change in sorted(changes):
        running += change
        peak = max(peak, running)
    return peak


def peak_output_rate(outcomes: Sequence[Outcome]) -> int:
    """Most tokens that arrived within one whole second of the run, counted from its start."""
    if not outcomes:
        return 0
    start = min(o.start_s for o in outcomes)
    per_second: Counter[int] = Counter()
    for outcome in outcomes:
        for after, count in outcome.arrivals:
            per_second[int(outcome.start_s - start + after)] += count
    return max(per_second.values(), default=0)


def table(figures: dict[str, Any]) -> str:
    """The printed table."""
    limit = figures["max_concurrency"]
    lines = [
        f"{' Serving Benchmark Result ':=^{_WIDTH}}",
        _row("Backend:", figures["backend"]),
        _row("Traffic request rate:", figures["request_rate"]),
        _row("Max request concurrency:", "not set" if limit is None else limit),
        _row("Successful requests:", figures["completed"]),
    ]
    if figures["failed"]:
        lines.append(_row("Failed requests:", figures["failed"]))
    lines += [
        _row("Benchmark duration (s):", figures["duration"]),
        _row("Total input tokens:", figures["total_input_tokens"]),
        _row("Total generated tokens:", figures["total_output_tokens"]),
    ]
    if figures["total_output_tokens_retokenized"] is not None:
        count = figures["total_output_tokens_retokenized"]
        lines.append(_row("Total generated tokens (retokenized):", count))
    lines += [
        _row("Request throughput (req/s):", figures["request_throughput"]),
        _row("Input token throughput (tok/s):", figures["input_throughput"]),
        _row("Output token throughput (tok/s):", figures["output_throughput"]),
        _row("Peak output token throughput (tok/s):", float(figures["max_output_tokens_per_s"])),
        _row("Peak concurrent requests:", figures["max_concurrent_requests"]),
        _row("Total token throughput (tok/s):", figures["total_throughput"]),
        _row("Concurrency:", figures["concurrency"]),
    ]
    if figures["accept_length"] is not None:
        lines.append(_row("Accept length:", figures["accept_length"]))
    for name, (title, short) in LATENCIES.items():
        lines.append(f"{title:-^{_WIDTH}}")
        for label in ("mean", "median", *(f"p{p}" for p in PERCENTILES)):
            lines.append(_row(f"{label.title()} {short} (ms):", figures[f"{label}_{name}_ms"]))
    lines.append(_row("Max ITL (ms):", figures["max_itl_ms"]))
    lines.append("=" * _WIDTH)
    return "\n".join(lines)


def _row(label: str, value: Any) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<{_LABEL}} {shown:<9}".rstrip()
