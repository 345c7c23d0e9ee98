"""The verdict as a table, as JSON and as one HTML page."""

from __future__ import annotations

import html
from dataclasses import dataclass, field

from sglang.parity.compare import GroupResult

COLUMNS = ("single", "turn 1", "turn 2", "batched")


@dataclass
class AlgorithmReport:
    """All comparisons of one algorithm.

    across   left server against right server, per column
    within   {side: first run against second run of the same server, per column}
    """

    algorithm: str
    across: dict[str, GroupResult] = field(default_factory=dict)
    within: dict[str, dict[str, GroupResult]] = field(default_factory=dict)
    accept_length: float | None = None

    @property
    def equal(self) -> bool:
        """True if every comparison across holds, and there was at least one."""
        return bool(self.across) and all(
            g.total > 0 and g.equal == g.total for g in self.across.values()
        )

    @property
    def num_comparisons(self) -> int:
        return sum(g.total for g in self.across.values())

    def to_dict(self) -> dict:
        return {
            "algorithm": self.algorithm,
            "equal": self.equal,
            "comparisons": self.num_comparisons,
            "accept_length": self.accept_length,
            "across": {name: g.to_dict() for name, g in self.across.items()},
            "within": {
                side: {name: g.to_dict() for name, g in groups.items()}
                for side, groups in self.within.items()
            },
        }


def _cell(groups: dict[str, GroupResult], column: str) -> str:
    return groups[column].ratio if column in groups else "-"


def _turns(groups: dict[str, GroupResult]) -> str:
    return f"{_cell(groups, 'turn 1')} · {_cell(groups, 'turn 2')}"


def _rows(reports: list[AlgorithmReport], left: str, right: str) -> list[list[str]]:
    rows = []
    for report in reports:
        length = "-" if report.accept_length is None else f"{report.accept_length:.2f}"
        cached = report.across["turn 2"].cached if "turn 2" in report.across else []
        shown = ", ".join(str(c) for c in sorted(set(cached))) or "-"
        lines = [(f"{left} = {right}", report.across, length, shown)]
        lines += [
            (f"{side}, run 1 = run 2", groups, "", "") for side, groups in report.within.items()
        ]
        for label, groups, accept, hit in lines:
            rows.append(
                [
                    report.algorithm,
                    label,
                    _cell(groups, "single"),
                    _turns(groups),
                    _cell(groups, "batched"),
                    accept,
                    hit,
                ]
            )
    return rows


HEAD = ["algorithm", "compared", "single", "turn 1 · turn 2", "batched", "accept len", "cached"]


def table(reports: list[AlgorithmReport], left: str, right: str) -> str:
    """The table for a terminal, then each difference in a line."""
    rows = [HEAD, *_rows(reports, left, right)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    lines.insert(1, "  ".join("-" * w for w in widths))
    for report in reports:
        tokens = sum(g.compared_tokens for g in report.across.values())
        digests = sum(g.compared_digests for g in report.across.values())
        lines.append(
            f"{report.algorithm}: {report.num_comparisons} outputs, {tokens} tokens and "
            f"{digests} state digests compared"
        )
        lines += [f"  {d.sentence()}" for g in report.across.values() for d in g.differences]
    return "\n".join(lines)


def page(reports: list[AlgorithmReport], left: str, right: str, command: str) -> str:
    """One self-contained HTML page."""
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in _rows(reports, left, right)
    )
    head = "".join(f"<th scope=col>{html.escape(name)}</th>" for name in HEAD)
    differences = [
        f"<li>{html.escape(report.algorithm)}: {html.escape(d.sentence())}</li>"
        for report in reports
        for group in report.across.values()
        for d in group.differences
    ]
    verdict = "equal" if all(r.equal for r in reports) else "not equal"
    listing = f"<ul>{''.join(differences)}</ul>" if differences else "<p>No differences.</p>"
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>Parity report</title>"
        "<style>:root{color-scheme:light dark}body{font:16px system-ui;margin:2rem}"
        "table{border-collapse:collapse}td,th{border:1px solid;padding:.3rem .6rem;"
        "text-align:left}</style>"
        f"<h1>Parity: {verdict}</h1><p><code>{html.escape(command)}</code></p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        f"<h2>Differences</h2>{listing}</html>"
    )
