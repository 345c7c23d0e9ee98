"""A memory plan as text: for the server's log, and side by side for ``sglang plan``. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.state_layout import total_bytes

if TYPE_CHECKING:
    from sglang.srt.mem_cache.plan_types import MemoryPlan

GIB = 1 << 30
MIB = 1 << 20


def human_bytes(nbytes: float) -> str:
    """Bytes in the largest binary unit that keeps a digit before the point.

    >>> human_bytes(64389120), human_bytes(6696468480), human_bytes(2048)
    ('61.41 MiB', '6.24 GiB', '2048 B')
    """
    if abs(nbytes) >= GIB:
        return f"{nbytes / GIB:.2f} GiB"
    if abs(nbytes) >= MIB:
        return f"{nbytes / MIB:.2f} MiB"
    return f"{int(nbytes)} B"


@dataclass(frozen=True)
class _Row:
    """One line: a label, how to read its number, how to print it, and whether a gain is shown."""

    label: str
    value: Callable[[MemoryPlan], float]
    show: Callable[[float], str]
    compare: bool = False


def _count(value: float) -> str:
    return f"{int(value):,}"


def _owner_bytes(plan: MemoryPlan, owner: str) -> int:
    return total_bytes([spec for spec in plan.tensors if spec.name.startswith(owner + ".")])


def _slot_state_bytes(plan: MemoryPlan) -> int:
    return _owner_bytes(plan, "state") - plan.verify_scratch_bytes


_ROWS: tuple[_Row, ...] = (
    _Row("device memory", lambda p: p.device_memory_bytes, human_bytes),
    _Row(
        "outside the static share (estimates)",
        lambda p: sum(line.nbytes for line in p.reserves),
        human_bytes,
    ),
    _Row("static share", lambda p: p.static_bytes, human_bytes),
    _Row("  weights", lambda p: p.weight_bytes, human_bytes),
    _Row("  draft weights", lambda p: p.draft_weight_bytes, human_bytes),
    _Row("  request rows", lambda p: _owner_bytes(p, "req"), human_bytes),
    _Row("  state slots", _slot_state_bytes, human_bytes, True),
    _Row("  verify scratch", lambda p: p.verify_scratch_bytes, human_bytes, True),
    _Row("    of it recurrent state", lambda p: p.verify_ssm_scratch_bytes, human_bytes, True),
    _Row("  KV, target", lambda p: _owner_bytes(p, "kv"), human_bytes, True),
    _Row("  KV, draft", lambda p: _owner_bytes(p, "draft_kv"), human_bytes, True),
    _Row("  unspent", lambda p: p.unspent_bytes, human_bytes),
    _Row("bytes of one state slot", lambda p: p.state_slot_bytes, human_bytes),
    _Row("KV bytes per token, target", lambda p: p.kv_bytes_per_token, _count),
    _Row("KV bytes per token, draft", lambda p: p.draft_kv_bytes_per_token, _count),
    _Row("draft tokens per verify", lambda p: p.draft_tokens or 0, _count),
    _Row("verify rows", lambda p: p.verify_rows, _count),
    _Row("state slots (max_mamba_cache_size)", lambda p: p.max_mamba_cache_size, _count, True),
    _Row("state slots per request", lambda p: p.slots_per_request, _count),
    _Row("max_running_requests, effective", lambda p: p.max_running_requests, _count, True),
    _Row("max_total_num_tokens", lambda p: p.max_total_num_tokens, _count, True),
    _Row("largest request, tokens", lambda p: p.largest_request_tokens, _count, True),
)


def _difference(row: _Row, first: MemoryPlan, second: MemoryPlan) -> str:
    before, after = row.value(first), row.value(second)
    if not row.compare or before == after:
        return ""
    sign = "+" if after > before else "-"
    text = f"{sign}{row.show(abs(after - before))}"
    return f"{text} ({100 * (after - before) / before:+.0f} %)" if before > 0 else text


def plan_table(columns: Sequence[tuple[str, MemoryPlan]]) -> str:
    """Plans side by side; with two of them, a last column with what changes."""
    titles = ["", *(title for title, _ in columns)]
    if len(columns) == 2:
        titles.append("difference")
    lines = [titles]
    for row in _ROWS:
        cells = [row.show(row.value(plan)) for _, plan in columns]
        if len(columns) == 2:
            cells.append(_difference(row, columns[0][1], columns[1][1]))
        lines.append([row.label, *cells])
    widths = [max(len(line[i]) for line in lines) for i in range(len(titles))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths))
        ).rstrip()
        for line in lines
    )


def format_plan(plan: MemoryPlan) -> str:
    """What the server prints at start: the table of one plan, its reserves and its notes."""
    title = "lossless verify" if plan.lossless_verify else "default verify"
    lines = [plan_table([(title, plan)])]
    lines += [f"set aside: {r.name} {human_bytes(r.nbytes)} ({r.note})" for r in plan.reserves]
    lines.append(
        f"types: KV {plan.kv_dtype}, conv {plan.conv_dtype}, recurrent state {plan.ssm_dtype}, "
        "update tuples float32"
    )
    return "\n".join([*lines, *(f"note: {note}" for note in plan.notes)])
