"""How a test file says where it runs.

A test file calls `register_<backend>_ci(...)` at its top level. The calls do nothing when the file
runs; the suite runner reads them from the syntax tree, so that listing the tests imports none.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path


class HWBackend(Enum):
    """Hardware that a test file can be registered for."""

    CPU = auto()
    CUDA = auto()
    AMD = auto()
    NPU = auto()
    XPU = auto()
    MUSA = auto()
    MLX = auto()
    MPS = auto()
    PPU = auto()


@dataclass(frozen=True)
class CIRegistry:
    """One registration of one test file.

    `est_time` is in seconds. Exactly one of `suite` and the pair (`stage`, `runner_config`) is given.
    `disabled` is the reason why the file does not run on this backend, or None.
    """

    backend: HWBackend
    filename: str
    est_time: float
    suite: str | None = None
    nightly: bool = False
    disabled: str | None = None
    stage: str | None = None
    runner_config: str | None = None

    @property
    def effective_suite(self) -> str:
        """The suite's name; the pair gives `{stage}-test-{runner_config}`."""
        if self.suite is not None:
            return self.suite
        return f"{self.stage}-test-{self.runner_config}"


def register_cpu_ci(
    est_time: float,
    suite: str | None = None,
    nightly: bool = False,
    disabled: str | None = None,
    *,
    stage: str | None = None,
    runner_config: str | None = None,
) -> None:
    """Run this file on a machine without a GPU."""


def register_cuda_ci(
    est_time: float,
    suite: str | None = None,
    nightly: bool = False,
    disabled: str | None = None,
    *,
    stage: str | None = None,
    runner_config: str | None = None,
) -> None:
    """Run this file on an NVIDIA GPU."""


def register_amd_ci(
    est_time: float,
    suite: str | None = None,
    nightly: bool = False,
    disabled: str | None = None,
    *,
    stage: str | None = None,
    runner_config: str | None = None,
) -> None:
    """Run this file on an AMD GPU."""


def register_npu_ci(
    est_time: float,
    suite: str | None = None,
    nightly: bool = False,
    disabled: str | None = None,
    *,
    stage: str | None = None,
    runner_config: str | None = None,
) -> None:
    """Run this file on an Ascend NPU."""


def register_xpu_ci(
    est_time: float,
    suite: str | None = None,
    nightly: bool = False,
    disabled: str | None = None,
    *,
    stage: str | None = None,
    runner_config: str | None = None,
) -> None:
    """Run this file on an Intel GPU."""


def register_musa_ci(
    est_time: float,
    suite: str | None = None,
    nightly: bool = False,
    disabled: str | None = None,
    *,
    stage: str | None = None,
    runner_config: str | None = None,
) -> None:
    """Run this file on a Moore Threads GPU."""


def register_mlx_ci(
    est_time: float,
    suite: str | None = None,
    nightly: bool = False,
    disabled: str | None = None,
    *,
    stage: str | None = None,
    runner_config: str | None = None,
) -> None:
    """Run this file with MLX on Apple silicon."""


def register_mps_ci(
    est_time: float,
    suite: str | None = None,
    nightly: bool = False,
    disabled: str | None = None,
    *,
    stage: str | None = None,
    runner_config: str | None = None,
) -> None:
    """Run this file with Metal on Apple silicon."""


def register_ppu_ci(
    est_time: float,
    suite: str | None = None,
    nightly: bool = False,
    disabled: str | None = None,
    *,
    stage: str | None = None,
    runner_config: str | None = None,
) -> None:
    """Run this file on a PPU."""


_BACKEND_OF_CALL = {f"register_{b.name.lower()}_ci": b for b in HWBackend}
_POSITIONAL = ("est_time", "suite", "nightly", "disabled")
_KEYWORDS = (*_POSITIONAL, "stage", "runner_config")


def _read_call(filename: str, name: str, call: ast.Call) -> CIRegistry:
    where = f"{filename}:{call.lineno}: {name}"
    if len(call.args) > len(_POSITIONAL):
        raise ValueError(f"{where} takes at most {len(_POSITIONAL)} positional arguments")
    nodes: dict[str, ast.expr] = dict(zip(_POSITIONAL, call.args, strict=False))
    for keyword in call.keywords:
        if keyword.arg not in _KEYWORDS or keyword.arg in nodes:
            raise ValueError(f"{where}: unexpected argument {keyword.arg!r}")
        nodes[keyword.arg] = keyword.value
    try:
        values = {key: ast.literal_eval(node) for key, node in nodes.items()}
    except ValueError as error:
        raise ValueError(f"{where}: arguments must be literals") from error
    if "est_time" not in values:
        raise ValueError(f"{where} needs est_time, the expected seconds")
    has_suite = values.get("suite") is not None
    pair = [values.get("stage") is not None, values.get("runner_config") is not None]
    if has_suite == any(pair) or any(pair) != all(pair):
        raise ValueError(f"{where} needs either suite, or both stage and runner_config")
    return CIRegistry(backend=_BACKEND_OF_CALL[name], filename=filename, **values)


def _called_name(node: ast.stmt) -> tuple[str, ast.Call] | None:
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return None
    function = node.value.func
    if isinstance(function, ast.Name):
        return function.id, node.value
    if isinstance(function, ast.Attribute):
        return function.attr, node.value
    return None


def _parse(filename: str) -> ast.Module:
    return ast.parse(Path(filename).read_text(encoding="utf-8"), filename=filename)


def ut_parse_one_file(filename: str) -> list[CIRegistry]:
    """Every registration at the top level of the file, in order of appearance.

    Raises: ValueError naming file and line if a registration cannot be read.
    """
    found = []
    for node in _parse(filename).body:
        called = _called_name(node)
        if called is not None and called[0] in _BACKEND_OF_CALL:
            found.append(_read_call(filename, *called))
    return found


def _has_executable_main(filename: str) -> bool:
    for node in _parse(filename).body:
        if not (isinstance(node, ast.If) and isinstance(node.test, ast.Compare)):
            continue
        sides = [node.test.left, *node.test.comparators]
        names = {side.id for side in sides if isinstance(side, ast.Name)}
        texts = {side.value for side in sides if isinstance(side, ast.Constant)}
        runs = any(isinstance(inner, ast.Call) for s in node.body for inner in ast.walk(s))
        if "__name__" in names and "__main__" in texts and runs:
            return True
    return False


def collect_tests(files: Iterable[str], sanity_check: bool = True) -> list[CIRegistry]:
    """The registrations of all files.

    Raises: ValueError naming each file that has no registration or, being run as a script, would
    run nothing; with `sanity_check=False` such files are left out silently.
    """
    found: list[CIRegistry] = []
    problems = []
    for filename in files:
        registrations = ut_parse_one_file(filename)
        found += registrations
        if not registrations:
            problems.append(f"{filename}: no registration; add register_cpu_ci(...) or another")
        elif not _has_executable_main(filename):
            problems.append(
                f'{filename}: needs an `if __name__ == "__main__":` that runs the tests'
            )
    if sanity_check and problems:
        raise ValueError("\n".join(problems))
    return found


def auto_partition(
    files: Sequence[CIRegistry],
    rank: int,
    size: int,
    live_est: Mapping[str, float] | None = None,
) -> list[CIRegistry]:
    """The share of runner `rank` out of `size` runners with nearly equal total time.

    Longest first, each to the runner with the least so far; the result does not depend on the
    order of `files`. `live_est` maps a file name to seconds measured lately, in place of est_time.
    """
    if size < 1 or not 0 <= rank < size:
        raise ValueError(f"rank {rank} is not in 0..{size - 1}")
    measured = live_est or {}

    def seconds(test: CIRegistry) -> float:
        return measured.get(test.filename, test.est_time)

    shares: list[list[CIRegistry]] = [[] for _ in range(size)]
    totals = [0.0] * size
    for test in sorted(files, key=lambda t: (-seconds(t), t.filename, t.backend.name)):
        lightest = totals.index(min(totals))
        shares[lightest].append(test)
        totals[lightest] += seconds(test)
    return shares[rank]
