"""A small SVG writer whose pictures follow the reader's light or dark setting."""

from __future__ import annotations

import html
from dataclasses import dataclass, field

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
