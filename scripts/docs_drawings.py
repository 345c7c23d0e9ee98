"""Draw the pictures of the documentation, as SVG that follows the reader's light or dark setting.

    python scripts/docs_drawings.py            write docs/images/*.svg
    python scripts/docs_drawings.py --check    fail if a picture is not what would be drawn

The bytes in the memory picture come from the planner, for a published configuration.
"""

from __future__ import annotations

import argparse
import contextlib
import html
import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
sys.path.insert(0, str(ROOT / "python"))

STYLE = """
text{font:14px system-ui,sans-serif;fill:#1f2430}
.small{font-size:12px}.bold{font-weight:600}.mid{text-anchor:middle}.end{text-anchor:end}
.box{fill:#eef1f8;stroke:#5b6b95}.state{fill:#c9d6f5;stroke:#3a53a4}.new{fill:#cdeccf;stroke:#2f7d3a}
.scratch{fill:#f6d5c3;stroke:#b0562b}.off{fill:none;stroke:#9aa3b5;stroke-dasharray:4 3}
.line{stroke:#3d465c;stroke-width:1.5;fill:none}.tip{fill:#3d465c}
@media (prefers-color-scheme:dark){text{fill:#e6e9f2}
.box{fill:#2a3042;stroke:#8b9ac6}.state{fill:#2d3f74;stroke:#8ea6ee}.new{fill:#23482a;stroke:#7fc68a}
.scratch{fill:#5d3620;stroke:#e39a6f}.off{stroke:#737d92}.line{stroke:#c3cade}.tip{fill:#c3cade}}
""".replace("\n", "")

PLAN = (
    *("--model-path", "test/registered/unit/model_configs/Qwen3.6-35B-A3B-FP8.json"),
    *("--device-memory-gb", "80", "--mem-fraction-static", "0.8", "--kv-cache-dtype", "bf16"),
    *("--page-size", "64", "--max-running-requests", "25", "--max-mamba-cache-size", "150"),
    *("--speculative-algorithm", "NEXTN", "--json"),
)
"""The configuration of docs/capacity_planning.md."""


@dataclass
class Drawing:
    """An SVG of a given size in pixels; coordinates grow to the right and down."""

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, w: float, h: float, kind: str = "box") -> None:
        self.parts.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="4"/>'
        )

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        name = f' class="{kind}"' if kind else ""
        self.parts.append(f'<text{name} x="{x:g}" y="{y:g}">{html.escape(words)}</text>')

    def labelled(
        self, x: float, y: float, w: float, h: float, words: str, kind: str = "box"
    ) -> None:
        """A box with its text in the middle; lines are divided by `|`."""
        self.box(x, y, w, h, kind)
        lines = words.split("|")
        for i, line in enumerate(lines):
            at = y + h / 2 + 5 + 16 * (i - (len(lines) - 1) / 2)
            self.text(x + w / 2, at, line, "mid" if i == 0 else "mid small")

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """A straight arrow, level or upright."""
        dx, dy = (x2 > x1) - (x2 < x1), (y2 > y1) - (y2 < y1)
        self.parts.append(
            f'<path class="line" d="M{x1:g} {y1:g}L{x2 - 6 * dx:g} {y2 - 6 * dy:g}"/>'
        )
        a = f"{x2 - 8 * dx - 4 * dy:g},{y2 - 8 * dy - 4 * dx:g}"
        b = f"{x2 - 8 * dx + 4 * dy:g},{y2 - 8 * dy + 4 * dx:g}"
        self.parts.append(f'<polygon class="tip" points="{x2:g},{y2:g} {a} {b}"/>')

    def line(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self.parts.append(f'<path class="line" d="M{x1:g} {y1:g}L{x2:g} {y2:g}"/>')

    def render(self) -> str:
        """The file's text."""
        title = html.escape(self.title)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img" aria-label="{title}">'
        )
        return "\n".join(
            [head, f"<title>{title}</title>", f"<style>{STYLE}</style>", *self.parts, "</svg>\n"]
        )


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


def planned() -> dict[str, dict]:
    """The planner's figures of both plans."""
    from sglang.srt.mem_cache import plan_cli

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.chdir(ROOT):
        status = plan_cli.main(list(PLAN))
    if status:
        raise RuntimeError(f"the planner refused the configuration of the picture ({status})")
    plans: dict[str, dict] = json.loads(out.getvalue())["plans"]
    return plans


def memory() -> Drawing:
    """What becomes of 64 GiB with and without the flag."""
    d = Drawing(760, 196, "Memory of Qwen3.6-35B-A3B-FP8 in 64 GiB, default and lossless verify")
    d.text(
        10, 22, "Qwen3.6-35B-A3B-FP8, 25 requests, MTP drafts, 64 GiB for weights and pools", "bold"
    )
    gib = 1 << 30
    for y, (name, plan) in zip((44, 128), planned().items(), strict=True):
        scratch = plan["verify_scratch_bytes"] / gib
        states = plan["state_slot_bytes"] * (plan["max_mamba_cache_size"] + 1) / gib
        price = plan["kv_bytes_per_token"] + plan["draft_kv_bytes_per_token"]
        kv = plan["max_total_num_tokens"] * price / gib
        weights = (plan["weight_bytes"] + plan["draft_weight_bytes"]) / gib
        scale = 640 / (plan["static_bytes"] / gib)
        d.text(100, y + 24, name, "end")
        x = 110.0
        for words, size, kind in (
            ("weights", weights, "box"),
            ("states", states, "state"),
            ("scratch", scratch, "scratch"),
            ("KV", kv, "new"),
        ):
            d.box(x, y, size * scale, 38, kind)
            if size * scale > 70:
                d.text(x + size * scale / 2, y + 24, f"{words} {size:.1f}", "mid small")
            x += size * scale
        tokens = f"{plan['max_total_num_tokens']:,} tokens of context"
        d.text(750, y + 58, f"verify scratch {scratch:.2f} GiB; {tokens}", "end")
    return d


DRAWINGS: dict[str, Callable[[], Drawing]] = {
    "rollback": rollback,
    "commit_order": commit_order,
    "resume": resume,
    "request_path": request_path,
    "memory": memory,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    args = parser.parse_args()
    IMAGES.mkdir(parents=True, exist_ok=True)
    stale = []
    for name, draw in DRAWINGS.items():
        path, text = IMAGES / f"{name}.svg", draw().render()
        if not args.check:
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(str(path.relative_to(ROOT)))
    for path_name in stale:
        print(f"{path_name} is out of date; run `make docs-drawings`")
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
