"""Model cards of the three checkpoints."""

from __future__ import annotations

from pathlib import Path

from examples.demo_model.evaluate import Acceptance, Report
from examples.demo_model.export import DRAFT_NAMES, TARGET_NAME
from examples.demo_model.sources import SOURCES

_ALGORITHMS = {"mtp": "MTP, D = 4", "dflash": "DFLASH, D = 8", "dspark": "DSPARK, D = 8 (gamma 7)"}


def write_cards(out: Path, report: Report, command: str, date: str, device_name: str) -> None:
    """Write ``README.md`` into every exported checkpoint below ``out``."""
    made = f"Made on {date} on {device_name} with:\n\n```\n{command}\n```\n"
    results = _results(report)
    target = (
        "# Demo model\n\n"
        "A small hybrid Gated-DeltaNet language model in the Qwen3.5 dense text format, for trying "
        "out and testing the server without a download. It writes recognisable English in the "
        "manner of old books and software manuals; it knows next to nothing.\n\n"
        f"{results}\n## Training\n\n{made}\n## Data and licences\n\n{_sources()}\n"
        "One document in fifty is held out of training. The weights come under the licence of this "
        "project; the sources keep their own licences, listed above and in NOTICE. The text itself is "
        "not part of the project: `python -m examples.demo_model corpus --data DATA` builds it "
        "again from the packages.\n"
    )
    (out / TARGET_NAME / "README.md").write_text(target, encoding="utf-8")
    for kind, name in DRAFT_NAMES.items():
        text = (
            f"# {kind.upper()} drafter of the demo model\n\n"
            "A block drafter for the checkpoint `demo`, distilled from it on text that it wrote "
            "itself and on its training text. It shares the target's embedding and head.\n\n"
            f"{results}\n## Training\n\n{made}\n"
            "Data and licence: as for `demo`.\n"
        )
        (out / name / "README.md").write_text(text, encoding="utf-8")


def _results(report: Report) -> str:
    lines = [
        "## Held-out results\n",
        f"Bits per byte: **{report.bits_per_byte}** ({report.held_out_tokens:,} tokens in windows "
        "of up to 1024).\n",
        "Greedy acceptance in tokens per step, the target's token included, over the target's own "
        "greedy continuations. *text*: openings of 64 tokens from held-out documents. *chat*: "
        "conversations left out of training, though many of their sentences recur in it.\n",
        "| drafter | text | chat |",
        "| --- | --- | --- |",
    ]
    for kind, title in _ALGORITHMS.items():
        cells = [_cell(report.acceptance[name].get(kind)) for name in ("text", "chat")]
        lines.append(f"| {title} | {cells[0]} | {cells[1]} |")
    lines.append(
        f"\nGreedy text of a model this small repeats itself: {report.repeated_share:.0%} of the "
        "8-token runs of the text continuations occurred before in the same continuation, and such "
        "runs are easy to draft.\n"
    )
    return "\n".join(lines)


def _cell(acceptance: Acceptance | None) -> str:
    if acceptance is None:
        return "—"
    return f"{acceptance.tokens_per_step:.2f} ({acceptance.steps:,} steps)"


def _sources() -> str:
    lines = ["| text | package | licence |", "| --- | --- | --- |"]
    kinds = {"deb": "Debian", "pip": "PyPI", "npm": "npm"}
    for source in SOURCES:
        version = f" {source.version}" if source.version else ""
        package = f"{kinds[source.kind]} {source.package}{version}"
        lines.append(f"| {source.title} | {package} | {source.licence} |")
    return "\n".join(lines) + "\n"
