"""The tables of a comparison, from its results: one of each workload, medians and their spread.

PYTHONPATH=python python benchmark/published/report.py results.json [--markdown table.md]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from setups import PUBLISHED, REFERENCES, SMALL_REFERENCES, Reference, check_output

GIB = 1 << 30
Run = dict[str, Any]


def _figure(name: str, factor: float = 1.0) -> Callable[[Run], float | None]:
    def read(run: Run) -> float | None:
        value = run["figures"][name]
        return None if value is None else value * factor

    return read


def _capacity(name: str, factor: float = 1.0) -> Callable[[Run], float | None]:
    def read(run: Run) -> float | None:
        value = run["capacity"][name]
        return None if value is None else value * factor

    return read


def _over_accept_length(run: Run) -> float | None:
    """Pretended lengths are drawn, so short runs differ in them; this does not."""
    figures = run["figures"]
    if not figures["accept_length"]:
        return None
    return float(figures["output_throughput"] / figures["accept_length"])


ROWS: tuple[tuple[str, str, Callable[[Run], float | None], str | None], ...] = (
    ("verify scratch, GiB", ".2f", _capacity("verify_ssm_scratch_bytes", 1 / GIB), "scratch_gib"),
    ("the same with conv windows, GiB", ".2f", _capacity("verify_scratch_bytes", 1 / GIB), None),
    ("max_total_num_tokens", ",.0f", _capacity("max_total_num_tokens"), "tokens"),
    ("most requests seen running", ".0f", lambda run: run["max_running_seen"], "running"),
    ("duration, s", ".2f", _figure("duration"), "duration_s"),
    ("output, tok/s", ",.1f", _figure("output_throughput"), "output_rate"),
    ("input, tok/s", ",.0f", _figure("input_throughput"), None),
    ("mean TTFT, s", ".2f", _figure("mean_ttft_ms", 1e-3), "ttft_s"),
    ("mean TPOT, ms", ".2f", _figure("mean_tpot_ms"), "tpot_ms"),
    ("p99 ITL, ms", ".1f", _figure("p99_itl_ms"), None),
    ("accept length", ".3f", _figure("accept_length"), None),
    ("output over accept length, 1/s", ",.1f", _over_accept_length, None),
    ("failed requests", ".0f", _figure("failed"), None),
    ("measured runs", ".0f", lambda run: 1.0, None),
)
"""(label, format, value of a run, attribute of a reference); the last row is summed, not averaged."""
WITH_SPREAD = ("duration, s", "output, tok/s")


def _measured(document: dict[str, Any], workload: str) -> dict[str, list[Run]]:
    """Arm -> its measured runs of a workload."""
    return {
        arm: [
            run
            for run in document["runs"]
            if run["measured"] and run["arm"] == arm and run["workload"]["name"] == workload
        ]
        for arm in document["arms"]
    }


def rows_of(document: dict[str, Any], workload: str) -> tuple[list[str], list[list[str]]]:
    """Header and lines of one workload: medians of the measured runs of each arm, some with min to max."""
    by_arm = _measured(document, workload)
    arms = list(by_arm)
    references = REFERENCES if workload == PUBLISHED.name else ()
    compared = [arm for arm in arms if arm != "off"] if "off" in arms else []
    header = ["", *arms, *(f"{arm} / off" for arm in compared), *(r.name for r in references)]
    lines = []
    for label, form, read, name in ROWS:
        values = {arm: _typical(by_arm[arm], read, total=label == "measured runs") for arm in arms}
        cells = [
            _show(values[arm], form)
            + (_spread(by_arm[arm], read, form) if label in WITH_SPREAD else "")
            for arm in arms
        ]
        cells += [_change(values[arm], values["off"]) for arm in compared]
        cells += [_reference(r, name, form) for r in references]
        lines.append([label, *cells])
    return header, lines


def _typical(
    runs: Sequence[Run], read: Callable[[Run], float | None], *, total: bool
) -> float | None:
    values = [value for run in runs if (value := read(run)) is not None]
    if not values:
        return None
    return sum(values) if total else statistics.median(values)


def _spread(runs: Sequence[Run], read: Callable[[Run], float | None], form: str) -> str:
    """`` (min to max)`` of several runs, nothing of one."""
    values = [value for run in runs if (value := read(run)) is not None]
    return f" ({min(values):{form}} to {max(values):{form}})" if len(values) > 1 else ""


def _show(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _change(value: float | None, base: float | None) -> str:
    return "-" if value is None or not base else f"{100 * (value / base - 1):+.1f} %"


def _reference(reference: Reference, name: str | None, form: str) -> str:
    return "-" if name is None else _show(vars(reference)[name], form)


def _facts(document: dict[str, Any]) -> list[str]:
    machine = document["machine"]
    facts = [
        f"{machine['gpu'] or machine['cpu']}, torch {machine['torch']}, Triton {machine['triton']}, "
        f"{document['date']}, commit {machine.get('commit') or 'not known'}",
        f"model: {document['model']}, weights {document['weights']}",
        f"acceptance: {document['acceptance']}",
        f"warm-up: {document['warm_up']}",
        "medians of the measured runs, with the least and the most where there are several",
    ]
    facts += [
        f"failed: {failure['setup']}, {failure['arm']}: {failure['why']}"
        for failure in document.get("failures", ())
    ]
    return facts + ([f"stopped early: {document['stopped']}"] if "stopped" in document else [])


def _workloads(document: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(r["workload"]["name"] for r in document["runs"] if r["measured"]))


def ratios(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Output throughput on over off of each workload that both arms have run.

    ratio    of the medians
    overlap  whether the arms' runs overlap, so that the ratio may be noise
    """
    found = []
    for workload in _workloads(document):
        by_arm = _measured(document, workload)
        off, on = (
            [run["figures"]["output_throughput"] for run in by_arm.get(arm, ())]
            for arm in ("off", "on")
        )
        if off and on:
            found.append(
                {
                    "workload": workload,
                    "ratio": statistics.median(on) / statistics.median(off),
                    "runs": [len(off), len(on)],
                    "overlap": min(on) <= max(off) and min(off) <= max(on),
                }
            )
    return found


def never_slower(document: dict[str, Any]) -> str:
    """One line: on over off of every workload, and whether on is slower anywhere."""
    found = ratios(document)
    if not found:
        return "never slower: not known, no workload has a run of both arms"
    slower = [entry for entry in found if entry["ratio"] < 1]
    verdict = "yes"
    if slower:
        verdict = f"no, in {len(slower)} of {len(found)}"
    cells = [
        f"{entry['workload']}: {entry['ratio']:.3f}" + (" (runs overlap)" * entry["overlap"])
        for entry in found
    ]
    return f"never slower: {verdict}; output tok/s, on / off: {'; '.join(cells)}"


def _note(document: dict[str, Any], workload: str) -> str | None:
    """Others' figures for a workload that stand below its table."""
    notes: dict[str, str] = SMALL_REFERENCES | document.get("notes", {})
    return notes.get(workload)


def text_table(document: dict[str, Any]) -> str:
    """For a terminal."""
    parts = list(_facts(document))
    for workload in _workloads(document):
        header, lines = rows_of(document, workload)
        widths = [max(len(row[i]) for row in [header, *lines]) for i in range(len(header))]
        parts += ["", workload]
        for row in [header, *lines]:
            cells = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))]
            parts.append("  ".join(cells).rstrip())
        if note := _note(document, workload):
            parts.append(note)
    return "\n".join([*parts, "", never_slower(document)])


def markdown(document: dict[str, Any]) -> str:
    """For a page."""
    parts = [*(f"{fact}  " for fact in _facts(document))]
    for workload in _workloads(document):
        header, lines = rows_of(document, workload)
        parts += ["", f"**{workload}**", "", "| " + " | ".join(header) + " |"]
        parts.append("|" + "---|" * len(header))
        parts += ["| " + " | ".join(row) + " |" for row in lines]
        if note := _note(document, workload):
            parts += ["", note]
    return "\n".join([*parts, "", never_slower(document)]) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables of a stored result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="JSON of run.py")
    parser.add_argument("--markdown", type=Path, help="write the tables there, too")
    args = parser.parse_args(argv)
    check_output(parser, "--markdown", args.markdown)
    try:
        document = json.loads(args.results.read_text())
        shown, page = text_table(document), markdown(document)
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
        parser.error(f"{args.results}: is no result of run.py ({type(error).__name__}: {error})")
    print(shown)
    if args.markdown is not None:
        args.markdown.write_text(page)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
