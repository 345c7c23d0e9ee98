"""Size gate: no file, class or function beyond the hard stops of the style guide.

An exemption is a line in EXEMPTIONS with its reason. An exemption that is not needed any more fails
too, so the list only shrinks.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("python", "test", "scripts", "benchmark", "examples")

MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 100
MAX_KERNEL_LINES = 200
MAX_CLASS_LINES = 400
KERNEL_DECORATORS = ("triton.jit", "triton_jit", "jit")

EXEMPTIONS: dict[str, str] = {}
"""`path` or `path:name` -> why it may be larger."""


@dataclass(frozen=True)
class Finding:
    """Something too long: where, what, how long and the limit."""

    key: str
    what: str
    lines: int
    limit: int

    def __str__(self) -> str:
        return f"{self.key}: {self.what} has {self.lines} lines, the limit is {self.limit}"


def python_files(root: Path = ROOT) -> Iterator[Path]:
    """Every Python file of ours."""
    for folder in FOLDERS:
        yield from sorted((root / folder).rglob("*.py"))


def _is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = (ast.unparse(d).split("(")[0] for d in node.decorator_list)
    return any(name in KERNEL_DECORATORS for name in names)


def _length(node: ast.stmt) -> int:
    return int(node.end_lineno or node.lineno) - node.lineno + 1


def _body_length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of code after signature and docstring: those two are contract, not complexity."""
    body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    return int(node.end_lineno or node.lineno) - body[0].lineno + 1 if body else 0


def check_source(key: str, source: str) -> list[Finding]:
    """What is too long in one file; `key` is its path in the messages."""
    findings = []
    lines = len(source.splitlines())
    if lines > MAX_FILE_LINES:
        findings.append(Finding(key, "file", lines, MAX_FILE_LINES))
    for node in ast.walk(ast.parse(source, filename=key)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            limit = MAX_KERNEL_LINES if _is_kernel(node) else MAX_FUNCTION_LINES
            what, lines = "function", _body_length(node)
        elif isinstance(node, ast.ClassDef):
            limit, what, lines = MAX_CLASS_LINES, "class", _length(node)
        else:
            continue
        if lines > limit:
            findings.append(Finding(f"{key}:{node.name}", what, lines, limit))
    return findings


def main() -> int:
    findings = [
        finding
        for path in python_files()
        for finding in check_source(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
    ]
    over = [f for f in findings if f.key not in EXEMPTIONS]
    for finding in over:
        print(finding)
    unused = sorted(set(EXEMPTIONS) - {f.key for f in findings})
    for key in unused:
        print(f"{key}: the exemption is not needed any more; remove its line")
    return 1 if over or unused else 0


if __name__ == "__main__":
    sys.exit(main())
