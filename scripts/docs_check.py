"""Check the documentation: links, code blocks and commands.

    python scripts/docs_check.py            every page under docs/, and the Markdown files beside it
    python scripts/docs_check.py PAGE ...   some of them

- A relative link must lead to a file of the repository, and its fragment to a heading there.
- A `python` block must compile; one with `>>>` is run and must print what it says.
- A `json` block must parse.
- Of each command in a `bash` block: the module, script, `make` target or `sglang` command must
  exist, every flag must be known to it, and so must the route of a `curl` call.
"""

from __future__ import annotations

import argparse
import doctest
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))
sys.path.insert(0, str(ROOT / "scripts"))

from docs_commands import CommandError, check_commands  # noqa: E402

FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[\w+-]*)[^\n]*\n(?P<body>.*?)^(?P=indent)```$", re.M | re.S
)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
HTML_SOURCE = re.compile(r"<(?:img|source)[^>]*\b(?:src|srcset)=\"([^\"]+)\"")
HEADING = re.compile(r"^#{1,6} +(.+?)(?: *\{#([\w-]+)\})?$", re.M)
GENERATED_PAGES = {
    "server_arguments.md": "docs/docs/advanced_features/server_arguments.mdx",
    "contributing.md": "CONTRIBUTING.md",
    "changes.md": "CHANGELOG.md",
}
"""Pages that exist only in the site -> the files that they are made of."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the line on which the text begins."""

    language: str
    body: str
    line: int


def pages() -> list[Path]:
    """All pages of the documentation."""
    beside = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    return [*beside, *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks of a page, without their indentation."""
    for match in FENCE.finditer(text):
        indent = len(match["indent"])
        body = "".join(line[indent:] for line in match["body"].splitlines(keepends=True))
        yield Block(match["language"], body, text.count("\n", 0, match.start()) + 2)


def anchors(text: str) -> set[str]:
    """Fragments that lead to a heading of the page."""
    found = set()
    for title, given in HEADING.findall(FENCE.sub("", text)):
        plain = re.sub(r"[^\w\s-]", "", title.replace("`", "")).strip().lower()
        found.add(given or re.sub(r"[-\s]+", "-", plain))
    return found


def link_problems(page: Path, text: str) -> Iterator[str]:
    """Relative links that lead nowhere."""
    prose = re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))
    for target in (*LINK.findall(prose), *HTML_SOURCE.findall(text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, fragment = unquote(target).partition("#")
        goal = page if not path else _resolve(page, path)
        if goal is None or not goal.exists():
            yield f"link to {target}, which does not exist"
        elif fragment and goal.suffix == ".md" and fragment not in anchors(goal.read_text("utf-8")):
            yield f"link to {target}: no such heading"


def _resolve(page: Path, path: str) -> Path:
    goal = (page.parent / path).resolve()
    inside = goal.is_relative_to(ROOT / "docs") and not goal.exists()
    if inside and goal.name in GENERATED_PAGES and goal.parent == ROOT / "docs":
        return ROOT / GENERATED_PAGES[goal.name]
    return goal


def python_problems(name: str, block: Block) -> Iterator[str]:
    """A block that does not compile, or does not print what it says."""
    if ">>>" not in block.body:
        try:
            compile(block.body, name, "exec")
        except SyntaxError as error:
            yield f"python block: {error}"
        return
    test = doctest.DocTestParser().get_doctest(block.body, {}, name, name, block.line)
    report: list[str] = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    if runner.run(test, out=report.append).failed:
        yield "example does not print what it says:\n" + "".join(report)


def block_problems(name: str, block: Block) -> Iterator[str]:
    """What is wrong with one block."""
    if block.language in ("python", "py", "pycon"):
        yield from python_problems(name, block)
    elif block.language == "json":
        try:
            json.loads(block.body)
        except json.JSONDecodeError as error:
            yield f"json block: {error}"
    elif block.language in ("bash", "sh", "shell", "console"):
        try:
            check_commands(block.body)
        except CommandError as error:
            yield str(error)


def check_page(page: Path) -> list[str]:
    """Every problem of a page, each with its place."""
    text = page.read_text(encoding="utf-8")
    name = str(page.relative_to(ROOT))
    problems = [f"{name}: {problem}" for problem in link_problems(page, text)]
    for block in blocks(text):
        problems += [f"{name}:{block.line}: {p}" for p in block_problems(name, block)]
    return problems


def main(argv: Sequence[str] | None = None) -> int:
    """Print the problems; 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*", type=Path, help="pages to check (default: all)")
    args = parser.parse_args(argv)
    chosen = [page.resolve() for page in args.pages] or pages()
    problems = [problem for page in chosen for problem in check_page(page)]
    print("\n".join(problems) or f"{len(chosen)} pages: links, code blocks and commands hold")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
