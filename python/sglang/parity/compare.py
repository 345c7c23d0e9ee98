"""Compare outcomes and say where they part."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from sglang.parity.client import Client, Completion
from sglang.parity.workloads import PROMPTS, Outcome


@dataclass
class Difference:
    """First position at which two outputs differ, or a differing state digest (position -1)."""

    group: str
    index: int
    position: int
    left: int | str | None
    right: int | str | None
    logit_gap: float | None = None

    def sentence(self) -> str:
        if self.position < 0:
            return f"{self.group} {self.index}: same tokens, but the recurrent state differs"
        gap = "" if self.logit_gap is None else f", gap of the two best {self.logit_gap:.2e}"
        return (
            f"{self.group} {self.index}: first difference at output {self.position}: "
            f"{self.left!r} against {self.right!r}{gap}"
        )


@dataclass
class GroupResult:
    """Comparisons of one column of the table."""

    group: str
    equal: int
    total: int
    compared_tokens: int
    compared_digests: int
    cached: list[int]
    differences: list[Difference]

    @property
    def ratio(self) -> str:
        return f"{self.equal}/{self.total}"

    def to_dict(self) -> dict:
        return asdict(self)


def first_difference(left: Completion, right: Completion) -> int | None:
    """Position of the first differing output, a missing tail included; None when equal."""
    for i, (a, b) in enumerate(zip(left.output, right.output)):
        if a != b:
            return i
    if len(left.output) != len(right.output):
        return min(len(left.output), len(right.output))
    return None


def compare(left: Outcome, right: Outcome, client: Client | None) -> list[GroupResult]:
    """Compare two outcomes of one workload, column by column.

    ``client``  asked for the logit gap at a first difference; None to leave it out
    Raises: ValueError if the outcomes are not of the same workload, or empty.
    """
    if left.group != right.group or not left.group:
        raise ValueError(f"nothing to compare: {len(left.group)} against {len(right.group)} runs")
    results: dict[str, GroupResult] = {}
    for group in dict.fromkeys(left.group):
        results[group] = GroupResult(group, 0, 0, 0, 0, [], [])
    for number, (group, a, b) in enumerate(
        zip(left.group, left.completions, right.completions, strict=True)
    ):
        result = results[group]
        index = result.total
        result.total += 1
        result.compared_tokens += len(a.output)
        if b.cached is not None:
            result.cached.append(b.cached)
        position = first_difference(a, b)
        if position is not None:
            result.differences.append(_difference(group, index, number, a, b, position, client))
            continue
        if a.digest is not None and b.digest is not None:
            result.compared_digests += 1
            if a.digest != b.digest:
                result.differences.append(Difference(group, index, -1, a.digest, b.digest))
                continue
        result.equal += 1
    return list(results.values())


def _difference(
    group: str,
    index: int,
    number: int,
    a: Completion,
    b: Completion,
    position: int,
    client: Client | None,
) -> Difference:
    def at(c: Completion) -> int | str | None:
        return c.output[position] if position < len(c.output) else None

    gap = None
    if client is not None:
        gap = client.gap(PROMPTS[number % len(PROMPTS)], a, position)
    return Difference(group, index, position, at(a), at(b), gap)
