"""Reads a profiler's timeline: what ran on the device, how long, and where it waited."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
HOST_CATEGORIES = ("cpu_op",)

PRODUCTS = "FP8 products (experts, dense)"
"""One kernel multiplies both in prompt chunks, so their times cannot be told apart by name."""
PARTS_OF_PRODUCTS = ("experts", "dense")

FAMILIES: tuple[tuple[str, str], ...] = (
    ("conv", r"conv_|conv1d"),
    ("attention", r"paged|hopper_prefill|combine_splits|store_kv|norm_rope|flash|attention|fmha"),
    (
        "GDN",
        r"gdn|replay_tuples|recurrent|prefill_chunk|prefill_state|chunk_|kkt|recompute_w_u|kernel_h|"
        r"l2norm|gated_norm|delta_rule|solve_tril|merge_16x16|scatter_entries|copy_slots",
    ),
    (
        "experts",
        r"grouped_gemm|expert|place_kernel|count_kernel|sort_rows|combine|route|moe|silu_mul",
    ),
    (PRODUCTS, r"hopper_product|hopper_gemm"),
    ("dense", r"block_scaled|fp8.*gemm|dense_gemm|narrow_linear"),
    ("quantisation", r"quant"),
    (
        "sampling",
        r"largest_|argmax|argmin|softmax|multinomial|sort|topk|accept|verdict|distribution|philox",
    ),
    ("norms and gates", r"rms_?norm|layer_?norm|gate_mul|sigmoid_mul"),
    ("library GEMM", r"nvjet|cublas|cutlass|gemm|gemv|splitk|xmma"),
    (
        "copies",
        r"memcpy|memset|copy|elementwise|index|gather|scatter|(?<!pre)fill|cat|where|arange|cumsum",
    ),
)
"""First that matches a kernel's name. A library GEMM of 100 us and more is the head."""
HEAD_US = 100.0
TO_HOST = "Memcpy DtoH"
LONG_WAIT_US = 10.0
"""Kernels of a CUDA graph follow each other within a few us; longer waits are the host's."""


@dataclass(frozen=True)
class Event:
    """Something that ran on the device; times in us."""

    name: str
    start: float
    length: float

    @property
    def end(self) -> float:
        return self.start + self.length


def read_trace(path: Path, categories: Sequence[str] = DEVICE_CATEGORIES) -> list[Event]:
    """Device events of an exported trace, in order of their start; graphs' kernels among them."""
    trace = json.loads(path.read_text())
    events = [
        Event(e["name"], float(e["ts"]), float(e["dur"]))
        for e in trace["traceEvents"]
        if e.get("cat") in categories and "dur" in e
    ]
    return sorted(events, key=lambda event: event.start)


def short_name(name: str) -> str:
    """A kernel's name without its template arguments."""
    plain = re.sub(r"^void ", "", name)
    plain = re.sub(r"<.*", "", plain)
    functor = re.search(r"(\w+)Functor|(\w+)_kernel_cuda|(\w+)KernelImpl", name)
    if functor and plain.startswith("at::"):
        inner = next(part for part in functor.groups() if part)
        plain = f"{plain} [{inner}]"
    return plain[:90]


def family_of(name: str, us_each: float) -> str:
    """Which part of the model a kernel belongs to."""
    lowered = name.lower()
    for family, pattern in FAMILIES:
        if re.search(pattern, lowered):
            return "head" if family == "library GEMM" and us_each >= HEAD_US else family
    return "rest"


@dataclass(frozen=True)
class Timeline:
    """Busy and idle time of the device over a window, in us."""

    span: float
    busy: float
    gaps: list[dict[str, Any]]

    @property
    def idle_share(self) -> float:
        return 1 - self.busy / self.span if self.span else 0.0


def timeline(events: Sequence[Event], *, most_gaps: int = 12) -> Timeline:
    """From the first start to the last end; overlapping events count once.

    gaps  waits added up by the kernels before and after them, the largest sums first
    """
    if not events:
        return Timeline(0.0, 0.0, [])
    busy, end, last = 0.0, events[0].start, events[0]
    waits: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in events:
        if event.start > end:
            waits[short_name(last.name), short_name(event.name)].append(event.start - end)
            end = event.start
        if event.end > end:
            busy += event.end - end
            end, last = event.end, event
    sums = sorted(waits.items(), key=lambda item: -sum(item[1]))[:most_gaps]
    gaps = [
        {"after": a, "before": b, "count": len(g), "total_us": sum(g), "longest_us": max(g)}
        for (a, b), g in sums
    ]
    return Timeline(end - events[0].start, busy, gaps)


@dataclass
class KernelRow:
    """A kernel's share of one step: mean calls and us a step."""

    name: str
    family: str
    calls: float
    us: float
    us_each: float


def kernel_rows(events: Iterable[Event], *, num_steps: int) -> list[KernelRow]:
    """Kernels by time a step, the longest first."""
    lengths: dict[str, list[float]] = defaultdict(list)
    for event in events:
        lengths[short_name(event.name)].append(event.length)
    rows = []
    for name, values in lengths.items():
        total, each = sum(values), sum(values) / len(values)
        rows.append(
            KernelRow(name, family_of(name, each), len(values) / num_steps, total / num_steps, each)
        )
    return sorted(rows, key=lambda row: -row.us)


def family_sums(rows: Sequence[KernelRow]) -> dict[str, float]:
    """us a step of each family, the longest first."""
    sums: dict[str, float] = defaultdict(float)
    for row in rows:
        sums[row.family] += row.us
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def reclassified(record: dict[str, Any]) -> dict[str, Any]:
    """A stored record with its kernels' families, and their sums, as this file sees them today."""
    rows = [KernelRow(**row) for row in record["kernels"]]
    for row in rows:
        row.family = family_of(row.name, row.us_each)
    return record | {
        "families_us": family_sums(rows),
        "kernels": [asdict(row) for row in rows],
    }


def floors_of_families(floors_us: dict[str, float], families: Iterable[str]) -> dict[str, float]:
    """Floors under the families of a step: one for both kinds of products if one kernel makes both."""
    if PRODUCTS not in families:
        return floors_us
    apart = {name: us for name, us in floors_us.items() if name not in PARTS_OF_PRODUCTS}
    return apart | {PRODUCTS: sum(floors_us.get(name, 0.0) for name in PARTS_OF_PRODUCTS)}


def profile_record(events: Sequence[Event], *, num_steps: int) -> dict[str, Any]:
    """Everything that a timeline says, for JSON."""
    rows, line = kernel_rows(events, num_steps=num_steps), timeline(events)
    return {
        "num_steps": num_steps,
        "gpu_busy_us_per_step": line.busy / num_steps,
        "gpu_span_us_per_step": line.span / num_steps,
        "gpu_idle_share": line.idle_share,
        "families_us": family_sums(rows),
        "kernels": [asdict(row) for row in rows],
        "gaps": line.gaps,
    }


def spans(events: Iterable[Event]) -> list[tuple[float, float]]:
    """Disjoint (start, end) in order, together all the time in which at least one event ran."""
    merged: list[tuple[float, float]] = []
    for event in sorted(events, key=lambda event: event.start):
        if merged and event.start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], event.end))
        else:
            merged.append((event.start, event.end))
    return merged


def overlap_us(events: Iterable[Event], others: Iterable[Event]) -> float:
    """Time in which one of ``events`` and one of ``others`` ran at once."""
    ours, theirs = spans(events), spans(others)
    total, i, j = 0.0, 0, 0
    while i < len(ours) and j < len(theirs):
        total += max(0.0, min(ours[i][1], theirs[j][1]) - max(ours[i][0], theirs[j][0]))
        if ours[i][1] <= theirs[j][1]:
            i += 1
        else:
            j += 1
    return total


def service_record(events: Sequence[Event], *, num_steps: int, wall_us: float) -> dict[str, Any]:
    """A timeline of work that nobody waited for, copies to the host apart from all else.

    wall_us  what the same work takes without the profiler, all steps together
    Busy and idle count everything but copies to the host, which are to run beside the kernels.
    """
    copies = [event for event in events if event.name.startswith(TO_HOST)]
    work = [event for event in events if not event.name.startswith(TO_HOST)]
    line, merged = timeline(work), spans(work)
    waits = [after[0] - before[1] for before, after in zip(merged, merged[1:], strict=False)]
    long = [wait for wait in waits if wait >= LONG_WAIT_US]
    copied = sum(end - start for start, end in spans(copies))
    return profile_record(work, num_steps=num_steps) | {
        "wall_us_per_step": wall_us / num_steps,
        "gpu_idle_share_of_wall": max(0.0, 1 - line.busy / wall_us),
        "copies_to_host": len(copies),
        "copies_to_host_us": copied,
        "copies_beside_work_share": overlap_us(copies, work) / copied if copied else None,
        "long_waits_per_step": len(long) / num_steps,
        "long_waits_share": sum(long) / line.span if line.span else 0.0,
        "longest_wait_us": max(waits, default=0.0),
    }


def service_notes(record: dict[str, Any]) -> list[str]:
    """What a service record says about waiting, in sentences."""
    copies = "No copies to the host."
    if record["copies_to_host"]:
        copies = (
            f"{record['copies_to_host']} copies to the host take {record['copies_to_host_us']:,.0f} "
            f"us in all, {100 * record['copies_beside_work_share']:.1f} % of it beside other work."
        )
    return [
        f"Idle, copies to the host aside: {100 * record['gpu_idle_share']:.1f} % of the profiled "
        f"timeline, {100 * record['gpu_idle_share_of_wall']:.1f} % of the wall time without the "
        "profiler.",
        f"Waits of {LONG_WAIT_US:g} us and more: {record['long_waits_per_step']:.1f} a step, "
        f"{100 * record['long_waits_share']:.1f} % of the timeline; the longest "
        f"{record['longest_wait_us']:,.0f} us.",
        copies,
    ]


def markdown_of(title: str, record: dict[str, Any], floors_us: dict[str, float]) -> str:
    """A step's families and kernels as two tables; ``floors_us`` by part of the model."""
    busy = record["gpu_busy_us_per_step"]
    floors_us = floors_of_families(floors_us, record["families_us"])
    parts = [
        f"### {title}",
        "",
        f"GPU busy {busy / 1000:.2f} ms a step, span {record['gpu_span_us_per_step'] / 1000:.2f} ms, "
        f"idle {100 * record['gpu_idle_share']:.1f} % of the timeline.",
        *(f"{line}  " for line in record.get("notes", [])),
        "",
        "| family | us | share | floor, us | over floor |",
        "|---|---|---|---|---|",
    ]
    for family, us in record["families_us"].items():
        floor = floors_us.get(family)
        shown = f"{floor:,.0f} | {us / floor:.2f}" if floor else "- | -"
        parts.append(f"| {family} | {us:,.0f} | {100 * us / max(busy, 1e-9):.1f} % | {shown} |")
    parts += ["", "| kernel | family | calls | us each | us |", "|---|---|---|---|---|"]
    for row in record["kernels"][:40]:
        parts.append(
            f"| `{row['name']}` | {row['family']} | {row['calls']:.1f} | {row['us_each']:.1f} | "
            f"{row['us']:,.0f} |"
        )
    if record["gaps"]:
        parts += [
            "",
            "| idle after | before | times | us in all | longest |",
            "|---|---|---|---|---|",
        ]
        parts += [
            f"| `{gap['after']}` | `{gap['before']}` | {gap['count']} | {gap['total_us']:,.0f} | "
            f"{gap['longest_us']:,.0f} |"
            for gap in record["gaps"]
        ]
    return "\n".join(parts) + "\n"
