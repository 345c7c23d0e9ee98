"""Pictures of a memory plan: what draft width and concurrency cost with and without lossless verify."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sglang.srt.arg_groups.attention_hook import validate_linear_lossless_verify
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.plan_types import MemoryPlan
from sglang.srt.mem_cache.planner import make_plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from sglang.srt.server_args import ServerArgs

DRAFT_WIDTHS = tuple(range(2, 17))
RUNNING_REQUESTS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64)
GIB = 1 << 30
COLOURS = {"default": "#b5482a", "lossless": "#1f6f8b"}


class PlotError(RuntimeError):
    """The picture cannot be drawn; the message says why."""


def check_plot_path(path: str) -> None:
    """Raise ValueError unless ``path`` names a PNG in a directory that exists."""
    file = Path(path)
    if file.suffix.lower() != ".png" or file.is_dir():
        raise ValueError(f"--plot {path}: name the picture, a file that ends in .png")
    if not file.absolute().parent.is_dir():
        raise ValueError(f"--plot {path}: {file.parent} is no directory; create it first")


def _with_width(args: ServerArgs, width: int) -> ServerArgs:
    steps = width - 1 if args.speculative_algorithm in ("EAGLE", "NEXTN") else 1
    return replace(args, speculative_num_draft_tokens=width, speculative_num_steps=steps)


def _with_running(args: ServerArgs, running: int) -> ServerArgs:
    return replace(args, max_running_requests=running)


def sweep(
    model: ModelConfig,
    args: ServerArgs,
    memory: int,
    values: Iterable[int],
    vary: Callable[[ServerArgs, int], ServerArgs],
) -> dict[str, list[tuple[int, MemoryPlan]]]:
    """Plans by variant for each value that has one; the server refuses the others."""
    points: dict[str, list[tuple[int, MemoryPlan]]] = {}
    for name, lossless in (("default", False), ("lossless", True)):
        points[name] = []
        for value in values:
            variant = replace(vary(args, value), enable_linear_lossless_verify=lossless)
            if not lossless:
                variant = replace(variant, linear_lossless_commit="immediate")
            try:
                validate_linear_lossless_verify(variant)
                plan = make_plan(model, variant, device_memory_bytes=memory)
            except ValueError:
                continue
            points[name].append((value, plan))
    return points


def _panel(
    axes: Axes,
    points: dict[str, list[tuple[int, MemoryPlan]]],
    value: Callable[[MemoryPlan], float],
    *,
    title: str,
    xlabel: str,
) -> None:
    for name, series in points.items():
        axes.plot(
            [x for x, _ in series],
            [value(plan) for _, plan in series],
            marker="o",
            markersize=3,
            label=name,
            color=COLOURS[name],
        )
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(xlabel)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def draw(model: ModelConfig, args: ServerArgs, memory: int, path: str) -> None:
    """Write a PNG of four panels: scratch and KV tokens against draft width and running requests.

    Raises: PlotError when matplotlib is missing, nothing is speculated, or the file cannot be written.
    """
    if args.speculative_algorithm is None:
        raise PlotError("--plot compares verify scratch: add --speculative-algorithm NEXTN")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError("--plot needs matplotlib: pip install 'sglang-lossless[plot]'") from error
    figure = Figure(figsize=(10, 7), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(2, 2)
    sweeps = (
        (DRAFT_WIDTHS, _with_width, "draft tokens per verify"),
        (RUNNING_REQUESTS, _with_running, "max running requests"),
    )
    for row, (values, vary, xlabel) in zip(grid, sweeps):
        points = sweep(model, args, memory, values, vary)
        _panel(
            row[0],
            points,
            lambda plan: plan.verify_scratch_bytes / GIB,
            title="verify scratch, GiB",
            xlabel=xlabel,
        )
        _panel(
            row[1],
            points,
            lambda plan: plan.max_total_num_tokens,
            title="max_total_num_tokens",
            xlabel=xlabel,
        )
    name = Path(args.model_path).name
    figure.suptitle(f"{name}: {memory / GIB:g} GiB per device")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise PlotError(f"--plot {path}: {error}") from error
