"""The verdict as a table, as JSON and as one HTML page."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

from sglang.parity.client import ServerFacts
from sglang.parity.compare import Difference, GroupResult

EQUAL, DIFFERENT, NOT_COMPARED = 0, 1, 2
VERDICTS = {EQUAL: "equal", DIFFERENT: "NOT equal", NOT_COMPARED: "not comparable"}
HEAD = ("algorithm", "compared", "single", "turn 1 · turn 2", "batched", "accept len", "cached")
MEMORY_HEAD = ("algorithm", "server", "verify scratch, bytes", "KV pool, tokens")


@dataclass
class AlgorithmReport:
    """All comparisons of one algorithm.

    across    left server against right server, by column
    within    {side: first run against second run of the same server, by column}
    facts     {side: what the server says of itself}
    problems  why equality would prove less than it seems to
    """

    algorithm: str
    across: dict[str, GroupResult] = field(default_factory=dict)
    within: dict[str, dict[str, GroupResult]] = field(default_factory=dict)
    facts: dict[str, ServerFacts] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    accept_length: float | None = None

    @property
    def verdict(self) -> int:
        """EQUAL only if everything was compared, each server with itself too, and all of it holds."""
        groups = [
            *self.across.values(),
            *(g for side in self.within.values() for g in side.values()),
        ]
        if any(not group.is_equal for group in groups):
            return DIFFERENT
        return EQUAL if self.across and not self.problems else NOT_COMPARED

    @property
    def num_comparisons(self) -> int:
        return sum(g.total for g in self.across.values())

    @property
    def num_tokens(self) -> int:
        return sum(g.compared_tokens for g in self.across.values())

    @property
    def num_chars(self) -> int:
        """Characters of outputs whose tokens no server counts."""
        return sum(g.compared_chars for g in self.across.values())

    @property
    def extent(self) -> str:
        """How much was compared, in words."""
        chars = f", {self.num_chars} characters without a count of tokens" if self.num_chars else ""
        return (
            f"{self.num_comparisons} outputs, {self.num_tokens} tokens{chars} and "
            f"{self.num_digests} state digests"
        )

    @property
    def num_digests(self) -> int:
        return sum(g.compared_digests for g in self.across.values())

    def sentences(self) -> Iterator[str]:
        """Every difference and every problem, a line each."""
        for group in self.across.values():
            yield from map(Difference.sentence, group.differences)
        for side, groups in self.within.items():
            for group in groups.values():
                for difference in group.differences:
                    yield f"{side} against itself: {difference.sentence()}"
            if any(not group.is_equal for group in groups.values()):
                yield (
                    f"{side} does not repeat itself, so a difference between the servers may not "
                    "come from the flag; --enable-deterministic-inference makes it repeat"
                )
        yield from self.problems

    def to_dict(self) -> dict:
        """JSON-compatible."""
        return {
            "algorithm": self.algorithm,
            "verdict": VERDICTS[self.verdict],
            "comparisons": self.num_comparisons,
            "tokens": self.num_tokens,
            "characters": self.num_chars,
            "state_digests": self.num_digests,
            "accept_length": self.accept_length,
            "across": {name: g.to_dict() for name, g in self.across.items()},
            "within": {
                side: {name: g.to_dict() for name, g in groups.items()}
                for side, groups in self.within.items()
            },
            "servers": {side: asdict(facts) for side, facts in self.facts.items()},
            "problems": self.problems,
        }


def overall(reports: Sequence[AlgorithmReport]) -> int:
    """One verdict for all: any difference, else anything that was not compared, else equal."""
    verdicts = {report.verdict for report in reports}
    return next((v for v in (DIFFERENT, NOT_COMPARED) if v in verdicts), EQUAL)


def _cell(groups: dict[str, GroupResult], column: str) -> str:
    return groups[column].ratio if column in groups else "-"


def _rows(report: AlgorithmReport) -> Iterator[tuple[str, ...]]:
    length = "-" if report.accept_length is None else f"{report.accept_length:.2f}"
    cached = report.across["turn 2"].cached if "turn 2" in report.across else []
    hits = ", ".join(str(c) for c in sorted(set(cached))) or "-"
    lines = [(" = ".join(report.within), report.across, length, hits)]
    lines += [(f"{side}, run 1 = run 2", groups, "", "") for side, groups in report.within.items()]
    for label, groups, *rest in lines:
        turns = f"{_cell(groups, 'turn 1')} · {_cell(groups, 'turn 2')}"
        single, batched = _cell(groups, "single"), _cell(groups, "batched")
        yield (report.algorithm, label, single, turns, batched, *rest)


def _memory_rows(report: AlgorithmReport) -> Iterator[tuple[str, ...]]:
    for side, facts in report.facts.items():
        if facts.scratch_bytes is not None and facts.total_tokens is not None:
            figures = (f"{facts.scratch_bytes:,}", f"{facts.total_tokens:,}")
            yield (report.algorithm, side, *figures)


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]
    lines.insert(1, "  ".join("-" * w for w in widths))
    return lines


def table(reports: Sequence[AlgorithmReport]) -> str:
    """The tables for a terminal, then what was compared, and each difference in a line."""
    lines = _columns([HEAD, *(row for report in reports for row in _rows(report))])
    memory = [row for report in reports for row in _memory_rows(report)]
    if memory:
        lines += ["", *_columns([MEMORY_HEAD, *memory])]
    lines.append("")
    for report in reports:
        lines.append(f"{report.algorithm}: {report.extent} compared")
        lines += [f"  {sentence}" for sentence in report.sentences()]
    return "\n".join(lines)


def _html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"


def page(reports: Sequence[AlgorithmReport], command: str) -> str:
    """One HTML page that needs nothing else."""
    verdict = VERDICTS[overall(reports)]
    sentences = [f"{r.algorithm}: {text}" for r in reports for text in r.sentences()]
    listing = "".join(f"<li>{html.escape(text)}</li>" for text in sentences)
    memory = [row for report in reports for row in _memory_rows(report)]
    counts = "".join(f"<li>{html.escape(r.algorithm)}: {r.extent}</li>" for r in reports)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Parity report</title>'
        "<style>:root{color-scheme:light dark}body{font:16px system-ui;margin:2rem}"
        "table{border-collapse:collapse}td,th{border:1px solid;padding:.3rem .6rem;"
        "text-align:left}</style></head><body>"
        f"<h1>Parity: {html.escape(verdict)}</h1><p><code>{html.escape(command)}</code></p>"
        + _html_table(HEAD, [row for report in reports for row in _rows(report)])
        + ("<h2>Memory</h2>" + _html_table(MEMORY_HEAD, memory) if memory else "")
        + f"<h2>Compared</h2><ul>{counts}</ul>"
        + (f"<h2>Differences</h2><ul>{listing}</ul>" if listing else "<p>No differences.</p>")
        + "</body></html>\n"
    )
