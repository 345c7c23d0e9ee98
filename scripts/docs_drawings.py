"""Draw the pictures of the documentation and fill in its tables of figures.

    python scripts/docs_drawings.py            write docs/images/*.svg and the tables in docs/benchmarks.md
    python scripts/docs_drawings.py --check    fail if a file is not what would be written

Bytes come from the planner, times from files that benchmarks wrote.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
FIGURES = ROOT / "docs" / "benchmarks.md"
sys.path.insert(0, str(ROOT / "python"))
sys.path.insert(0, str(ROOT / "scripts"))

from docs_charts import memory, verify_time, with_tables  # noqa: E402
from docs_svg import Drawing  # noqa: E402


def rollback() -> Drawing:
    """What a verify of four rows keeps, by default and with the flag."""
    d = Drawing(760, 330, "A verify of four rows keeps four whole states, or four small updates")
    for y, name in ((24, "default: snapshots"), (180, "lossless: update tuples")):
        d.text(10, y, name, "bold")
        d.labelled(10, y + 16, 90, 90, "state|V x K", "state")
        d.text(10, y + 122, "verify leaves it", "small")
    for i in range(4):
        x = 140 + 110 * i
        d.labelled(x, 40, 90, 90, f"after row {i}|V x K", "scratch")
        d.box(x, 196, 10, 90, "scratch")
        d.box(x + 16, 196, 90 - 16, 10, "scratch")
        d.box(x + 16, 212, 10, 10, "scratch")
        d.text(x + 34, 222, "decay", "small")
        d.text(x + 16, 250, "u: V numbers", "small")
        d.text(x + 16, 268, "k: K numbers", "small")
    d.arrow(580, 85, 630, 85)
    d.labelled(632, 40, 118, 90, "copy one|the last accepted", "new")
    d.arrow(580, 241, 630, 241)
    d.labelled(632, 196, 118, 90, "replay|the accepted rows", "new")
    d.text(
        380,
        322,
        "Both give the same bits. The second keeps V + K + 1 numbers a row, not V x K.",
        "mid",
    )
    return d


def commit_order() -> Drawing:
    """Why the boundary state is taken first."""
    d = Drawing(760, 210, "The boundary state is rebuilt first, then the working state advances")
    d.labelled(10, 60, 140, 60, "working state|253 tokens", "state")
    d.text(80, 44, "before commit", "mid small")
    d.arrow(152, 75, 300, 75)
    d.text(226, 66, "1. replay 3 rows", "mid small")
    d.labelled(302, 40, 170, 50, "track slot|256 tokens", "new")
    d.arrow(152, 110, 300, 110)
    d.text(226, 128, "2. replay 4 rows", "mid small")
    d.labelled(302, 100, 170, 50, "working state|257 tokens", "new")
    d.labelled(540, 40, 210, 50, "later turns resume here", "box")
    d.arrow(474, 65, 538, 65)
    d.labelled(540, 100, 210, 50, "the request goes on", "box")
    d.arrow(474, 125, 538, 125)
    d.text(
        380,
        190,
        "The other order would replay three rows on top of 257 tokens and file the result under 256.",
        "mid small",
    )
    return d


def resume() -> Drawing:
    """A conversation whose second turn resumes from the last boundary."""
    d = Drawing(
        760,
        170,
        "A first turn of 700 tokens stores states at 256 and 512; the second resumes at 512",
    )
    scale = 0.85
    d.text(10, 34, "turn 1", "bold")
    d.box(70, 18, 700 * scale, 24, "state")
    d.text(70 + 350 * scale, 35, "700 tokens", "mid small")
    for at in (256, 512):
        x = 70 + at * scale
        d.line(x, 12, x, 60)
        d.text(x, 76, f"state at {at}", "mid small")
    d.text(10, 124, "turn 2", "bold")
    d.box(70, 108, 512 * scale, 24, "off")
    d.text(70 + 256 * scale, 125, "cached_tokens: 512", "mid small")
    d.box(70 + 512 * scale, 108, 190 * scale, 24, "new")
    d.text(70 + 607 * scale, 125, "computed", "mid small")
    d.text(
        380,
        160,
        "A wrong state at 512 would never slow anything down; it would only change turn 2.",
        "mid small",
    )
    return d


def request_path() -> Drawing:
    """From HTTP to token."""
    d = Drawing(760, 330, "The path of a request through the two processes")
    d.box(10, 26, 740, 76, "off")
    d.text(20, 18, "front end: one process without torch", "small")
    d.box(10, 146, 740, 150, "off")
    d.text(20, 312, "scheduler and model runner: one process for each GPU", "small")
    for i, words in enumerate(
        ("HTTP routes|entrypoints", "tokenizer|managers", "detokenizer|managers")
    ):
        d.labelled(30 + 250 * i, 40, 170, 48, words)
    d.arrow(202, 64, 278, 64)
    d.line(615, 40, 615, 34)
    d.line(615, 34, 115, 34)
    d.arrow(115, 34, 115, 40)
    names = (
        "admit|scheduler",
        "draft|drafter",
        "verify|model runner",
        "accept|sampler",
        "commit|backend, pools",
    )
    for i, words in enumerate(names):
        kind = "new" if i == 4 else "box"
        d.labelled(24 + 147 * i, 176, 118, 54, words, kind)
        if i < 4:
            d.arrow(144 + 147 * i, 203, 169 + 147 * i, 203)
    d.line(365, 90, 365, 124)
    d.line(365, 124, 83, 124)
    d.arrow(83, 124, 83, 174)
    d.text(224, 118, "ids, sampling parameters (ZeroMQ)", "mid small")
    d.line(671, 174, 671, 124)
    d.line(671, 124, 615, 124)
    d.arrow(615, 124, 615, 90)
    d.text(600, 140, "new token ids", "end small")
    d.line(671, 232, 671, 262)
    d.line(671, 262, 83, 262)
    d.arrow(83, 262, 83, 232)
    d.text(377, 280, "only commit moves a request forward", "mid small")
    return d


DRAWINGS: dict[str, Callable[[], Drawing]] = {
    "rollback": rollback,
    "commit_order": commit_order,
    "resume": resume,
    "request_path": request_path,
    "memory": memory,
    "verify_time": verify_time,
}


def contents() -> dict[Path, str]:
    """Every file that this script writes."""
    files = {IMAGES / f"{name}.svg": draw().render() for name, draw in DRAWINGS.items()}
    files[FIGURES] = with_tables(FIGURES.read_text(encoding="utf-8"))
    return files


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    args = parser.parse_args()
    stale = 0
    for path, text in contents().items():
        if not args.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            print(f"{path.relative_to(ROOT)} is out of date; run `make docs-drawings`")
            stale = 1
    return stale


if __name__ == "__main__":
    raise SystemExit(main())
