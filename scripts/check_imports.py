"""Import gate: imports point down, kernels know nothing of the engine, the front end has no torch.

    entrypoints -> managers -> model_executor -> layers -> kernels

`mem_cache` serves managers and model_executor and imports neither. Read from the syntax tree, so
imports inside functions count as well; imports for type checking alone do not.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "python"

FORBIDDEN: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (
        "sglang.kernels",
        ("sglang.srt",),
        "kernels take tensors and know nothing of the engine",
    ),
    (
        "sglang.srt.layers",
        (
            "sglang.srt.entrypoints",
            "sglang.srt.managers",
            "sglang.srt.model_executor.model_runner",
            "sglang.srt.models",
            "sglang.srt.speculative",
        ),
        "layers serve models and the runner",
    ),
    (
        "sglang.srt.models",
        ("sglang.srt.entrypoints", "sglang.srt.managers", "sglang.srt.mem_cache"),
        "a model holds modules and the weight-name map, nothing else",
    ),
    (
        "sglang.srt.model_executor",
        ("sglang.srt.entrypoints", "sglang.srt.managers"),
        "the runner executes what the scheduler decided",
    ),
    (
        "sglang.srt.mem_cache",
        ("sglang.srt.entrypoints", "sglang.srt.managers", "sglang.srt.model_executor"),
        "memory serves managers and model_executor and imports neither",
    ),
    (
        "sglang.srt.managers",
        ("sglang.srt.entrypoints",),
        "managers know nothing of HTTP",
    ),
    (
        "sglang.srt.configs",
        (
            "sglang.srt.entrypoints",
            "sglang.srt.managers",
            "sglang.srt.model_executor",
            "sglang.srt.mem_cache",
            "sglang.srt.layers",
            "sglang.srt.models",
        ),
        "configs are read by everything and read nothing",
    ),
    (
        "sglang.srt",
        ("sglang.test", "sglang.demo"),
        "the engine does not need its tests or its demo",
    ),
)
"""(importer, what it must not import, why); a name stands for the module and all below it."""

TORCH_FREE: tuple[str, ...] = (
    "sglang",
    "sglang.bundled",
    "sglang.cli.main",
    "sglang.demo",
    "sglang.launch_server",
    "sglang.srt.arg_groups.pipeline",
    "sglang.srt.configs.draft_config",
    "sglang.srt.configs.model_config",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.entrypoints.engine",
    "sglang.srt.environ",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.io_struct",
    "sglang.srt.managers.tokenizer_manager",
    "sglang.srt.runtime_context",
    "sglang.srt.sampling.sampling_params",
    "sglang.srt.server_args",
    "sglang.srt.utils",
)
"""Modules that the front-end process imports; nothing that they import at module level is torch."""


@dataclass(frozen=True)
class Import:
    """One import of `target` by `module`; `at_top` if it runs when the module is imported."""

    module: str
    target: str
    line: int
    at_top: bool


def module_name(path: Path) -> str:
    """`python/sglang/srt/environ.py` -> `sglang.srt.environ`."""
    parts = list(path.relative_to(SOURCE).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in (
        "TYPE_CHECKING",
        "typing.TYPE_CHECKING",
    )


def _targets(node: ast.AST, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*parents, *([base] if base else [])])
        yield base
        yield from (f"{base}.{alias.name}" for alias in node.names)


def imports_of(module: str, source: str, is_package: bool = False) -> list[Import]:
    """Every import in a module's source that is not for type checking alone."""
    package = module if is_package else module.rpartition(".")[0]
    found: list[Import] = []

    def visit(node: ast.AST, at_top: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if _is_type_checking(child):
                for other in child.orelse:  # type: ignore[attr-defined]
                    visit(other, at_top)
                continue
            for target in _targets(child, package):
                found.append(Import(module, target, child.lineno, at_top))  # type: ignore[attr-defined]
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            visit(child, at_top and not inside)

    visit(ast.parse(source), True)
    return found


def _is_within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def wrong_directions(imports: Iterable[Import]) -> list[str]:
    """One sentence for each import that points up; each line is named once."""
    problems = {}
    for item in imports:
        for importer, targets, why in FORBIDDEN:
            for target in targets:
                if _is_within(item.module, importer) and _is_within(item.target, target):
                    key = (item.module, item.line, target)
                    problems[key] = f"{item.module}:{item.line} imports {target}: {why}"
    return list(problems.values())


def torch_paths(graph: dict[str, list[Import]], roots: Iterable[str]) -> list[str]:
    """One sentence for each root from which module-level imports reach torch."""
    problems = []
    for root in roots:
        if root not in graph:
            continue
        came_from: dict[str, str] = {root: ""}
        queue = [root]
        while queue:
            module = queue.pop(0)
            for item in graph[module]:
                if not item.at_top:
                    continue
                if _is_within(item.target, "torch"):
                    chain = [module]
                    while came_from[chain[-1]]:
                        chain.append(came_from[chain[-1]])
                    problems.append(f"{' <- '.join(['torch', *chain])}")
                    queue.clear()
                    break
                parents = item.target.split(".")
                for depth in range(1, len(parents) + 1):
                    name = ".".join(parents[:depth])
                    if name in graph and name not in came_from:
                        came_from[name] = module
                        queue.append(name)
    return problems


def load_graph() -> dict[str, list[Import]]:
    """Imports of every module under python/."""
    graph = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = module_name(path)
        is_package = path.name == "__init__.py"
        graph[name] = imports_of(name, path.read_text(encoding="utf-8"), is_package)
    return graph


def main() -> int:
    graph = load_graph()
    problems = wrong_directions(item for items in graph.values() for item in items)
    problems += torch_paths(graph, TORCH_FREE)
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
