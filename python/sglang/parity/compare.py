"""Compare outcomes and say where they part."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace

from sglang.parity.client import Client, Completion
from sglang.parity.workloads import Outcome


@dataclass
class Difference:
    """First position at which two outputs differ, or differing state digests (position -1).

    ``is_text``    the position counts characters, as a server reports no token ids
    ``logit_gap``  difference of the two best log probabilities there: small at a near tie
    """

    group: str
    index: int
    position: int
    left: int | str | None
    right: int | str | None
    logit_gap: float | None = None
    is_text: bool = False

    def sentence(self) -> str:
        """One line for a person."""
        if self.position < 0:
            return f"{self.group} {self.index}: same tokens, but the recurrent state differs"
        gap = "" if self.logit_gap is None else f", gap of the two best {self.logit_gap:.2e}"
        return (
            f"{self.group} {self.index}: first difference at "
            f"{'character' if self.is_text else 'output'} {self.position}: "
            f"{self.left!r} against {self.right!r}{gap}"
        )


@dataclass
class GroupResult:
    """Comparisons of one column of the table.

    ``cached``  prompt tokens from the prefix cache, of each right output that reports them
    ``compared_chars``  characters of outputs whose tokens neither server counts
    """

    group: str
    equal: int = 0
    total: int = 0
    compared_tokens: int = 0
    compared_chars: int = 0
    compared_digests: int = 0
    cached: list[int] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)

    @property
    def ratio(self) -> str:
        return f"{self.equal}/{self.total}"

    @property
    def is_equal(self) -> bool:
        """True if all comparisons hold, and there was at least one."""
        return 0 < self.total == self.equal

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
    results = {group: GroupResult(group) for group in dict.fromkeys(left.group)}
    for group, a, b in zip(left.group, left.completions, right.completions, strict=True):
        _compare_one(results[group], a, b, client)
    return list(results.values())


def compare_runs(
    left: dict[str, Outcome], right: dict[str, Outcome], client: Client | None
) -> dict[str, GroupResult]:
    """Compare all workloads of two runs; results by column."""
    groups: Iterable[GroupResult] = (
        group for name in left for group in compare(left[name], right[name], client)
    )
    return {group.group: group for group in groups}


def _compare_one(result: GroupResult, a: Completion, b: Completion, client: Client | None) -> None:
    index = result.total
    result.total += 1
    counts = [c.num_tokens for c in (a, b) if c.num_tokens is not None]
    if a.has_ids and b.has_ids:
        counts = [len(a.output)]
    else:
        a, b = _as_text(a), _as_text(b)
    result.compared_tokens += max(counts, default=0)
    result.compared_chars += 0 if counts else len(a.output)
    if b.cached is not None:
        result.cached.append(b.cached)
    position = first_difference(a, b)
    if position is not None:
        gap = client.gap(a, position) if client is not None else None
        left, right = (c.output[position] if position < len(c.output) else None for c in (a, b))
        is_text = isinstance(left, str) or isinstance(right, str)
        result.differences.append(
            Difference(result.group, index, position, left, right, gap, is_text)
        )
        return
    if a.digest is not None and b.digest is not None:
        result.compared_digests += 1
        if a.digest != b.digest:
            result.differences.append(Difference(result.group, index, -1, a.digest, b.digest))
            return
    result.equal += 1


def _as_text(completion: Completion) -> Completion:
    return replace(completion, output=list(completion.text))
