"""Put the output of the compile audit into docs/compile_audit.md as a table.

python -m sglang.kernels.audit | python scripts/docs_audit.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "compile_audit.md"
MARKS = ("<!-- audit: begin -->", "<!-- audit: end -->")
LINE = re.compile(
    r"^(?P<variant>\S.*?) {2,}(?P<target>sm_\d+|gfx\w+) +(?P<expected>\d+)  (?P<found>.*?) {2,}"
    r"(?P<verdict>(?:not )?exact)(?P<ok>, as it must be|: WRONG)$"
)


def table(output: str) -> str:
    """One row for each kernel, one column for each target.

    Raises: ValueError if there is no finding, or if one is not as it must be.
    """
    rows: dict[str, dict[str, str]] = {}
    targets: list[str] = []
    for match in map(LINE.match, output.splitlines()):
        if match is None:
            continue
        if "WRONG" in match["ok"]:
            raise ValueError(f"the audit failed: {match.group()}")
        target = match["target"]
        if target not in targets:
            targets.append(target)
        pairs = "/".join(re.findall(r"\d+", re.sub(r"[a-z]+ ", "", match["found"])))
        cell = f"{pairs} of {match['expected']}" if match["verdict"] != "exact" else pairs
        rows.setdefault(match["variant"], {})[target] = cell
    if not rows:
        raise ValueError("no line of the audit's output was understood")
    lines = ["| kernel | " + " | ".join(targets) + " |", "|---" * (len(targets) + 1) + "|"]
    for variant, cells in rows.items():
        shown = " | ".join(cells.get(target, "") for target in targets)
        lines.append(f"| {variant} | {shown} |")
    return "\n".join(lines)


def main() -> int:
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    middle = table(sys.stdin.read())
    PAGE.write_text(f"{before}{MARKS[0]}\n{middle}\n{MARKS[1]}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
