"""``sglang plan``: the server's memory plan without a GPU, weights or torch."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace

from sglang.srt.arg_groups.attention_hook import validate_linear_lossless_verify
from sglang.srt.arg_groups.basic_hook import (
    detect_device,
    handle_cuda_graphs,
    handle_page_and_chunk,
)
from sglang.srt.arg_groups.check_values import check_values
from sglang.srt.arg_groups.hicache_hook import handle_hierarchical_cache
from sglang.srt.arg_groups.mamba_hook import handle_mamba_radix_cache
from sglang.srt.arg_groups.model_hook import handle_model
from sglang.srt.arg_groups.pipeline import run_hook
from sglang.srt.arg_groups.speculative_hook import handle_speculative_decoding
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.device_memory import planned_memory
from sglang.srt.mem_cache.plan_inputs import MemoryPlanError
from sglang.srt.mem_cache.plan_plot import PlotError, check_plot_path, draw
from sglang.srt.mem_cache.plan_table import human_bytes, plan_table
from sglang.srt.mem_cache.plan_types import MemoryPlan
from sglang.srt.mem_cache.planner import make_plan
from sglang.srt.server_args import ServerArgs, prepare_server_args

NO_PLAN, BAD_ARGUMENTS = 1, 2

_STEPS = (
    check_values,
    handle_model,
    handle_page_and_chunk,
    handle_speculative_decoding,
    handle_mamba_radix_cache,
    handle_hierarchical_cache,
    handle_cuda_graphs,
)


def build_parser() -> argparse.ArgumentParser:
    """Parser of ``sglang plan``: every server flag, and how to print."""
    parser = argparse.ArgumentParser(
        prog="sglang plan",
        description="Show what a server would do with a device's memory, with and without lossless "
        "verify. Needs the model's config.json only: no GPU and no weights.",
        allow_abbrev=False,
    )
    _add_output_flags(parser)
    ServerArgs.add_cli_args(parser)
    return parser


def _add_output_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="Print JSON instead of a table.")
    parser.add_argument(
        "--plot",
        metavar="FILE.png",
        help="Draw verify scratch and KV capacity against draft width and running requests.",
    )


def read_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, ServerArgs]:
    """How to print, and the server's arguments, those in the file of ``--config`` included.

    Words that cannot be read print usage and exit with status 2. Raises: ValueError, OSError.
    """
    build_parser().parse_args(argv)
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    _add_output_flags(own)
    output, words = own.parse_known_args(argv)
    return output, prepare_server_args(words)


def resolve_for_plan(args: ServerArgs) -> ServerArgs:
    """Decide what the planner reads, for the device that is asked for and not the one at hand.

    ``--device auto`` means a GPU as soon as ``--device-memory-gb`` is given. Raises: ValueError.
    """
    device = args.device
    if device == "auto":
        device = "cuda" if args.device_memory_gb is not None else detect_device()
    dtype = args.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    args = replace(args, device=device, dtype=dtype)
    for step in _STEPS:
        args = run_hook(step, args)
    return args


def device_budget(args: ServerArgs) -> int:
    """Bytes to plan with. Raises: MemoryPlanError when a GPU's memory is not given."""
    if args.device_memory_gb is not None or args.device == "cpu":
        return planned_memory(args)
    raise MemoryPlanError(
        "--device-memory-gb is needed: the plan is made without touching a GPU, so give its memory "
        "in GiB (80 for an 80 GB card), or --device cpu"
    )


def plan_both(model: ModelConfig, args: ServerArgs) -> dict[str, MemoryPlan | str]:
    """Plans by name, ``default`` and ``lossless``; a message where there can be none."""
    plans: dict[str, MemoryPlan | str] = {}
    for name, lossless in (("default", False), ("lossless", True)):
        variant = replace(args, enable_linear_lossless_verify=lossless)
        if not lossless:
            variant = replace(variant, linear_lossless_commit="immediate")
        try:
            validate_linear_lossless_verify(variant)
            plans[name] = make_plan(model, variant, device_memory_bytes=device_budget(args))
        except ValueError as error:
            plans[name] = str(error)
    return plans


def _as_json(args: ServerArgs, asked: str, plans: dict[str, MemoryPlan | str]) -> str:
    values = {
        name: {"error": plan} if isinstance(plan, str) else plan.to_dict()
        for name, plan in plans.items()
    }
    return json.dumps({"model_path": args.model_path, "asked": asked, "plans": values}, indent=2)


def _as_text(args: ServerArgs, asked: str, plans: dict[str, MemoryPlan | str]) -> str:
    made = [(name, plan) for name, plan in plans.items() if isinstance(plan, MemoryPlan)]
    lines = [f"{args.model_path} on {args.device}, one of {args.tp_size * args.pp_size} rank(s)"]
    if made:
        shown = made[-1][1]
        lines += ["", plan_table(made), ""]
        lines += [f"set aside: {r.name} {human_bytes(r.nbytes)} ({r.note})" for r in shown.reserves]
        lines.append(
            f"static share: --mem-fraction-static {shown.mem_fraction_static:g}; types: KV "
            f"{shown.kv_dtype}, conv {shown.conv_dtype}, recurrent state {shown.ssm_dtype}"
        )
    for name, plan in plans.items():
        if isinstance(plan, str):
            lines.append(f"no {name} plan: {plan}")
        else:
            lines += [f"{name}: {note}" for note in plan.notes]
    lines.append(f"the flags as given ask for the {asked} plan")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0, 1 if the flags as given cannot work, 2 if they are wrong."""
    try:
        output, args = read_arguments(sys.argv[1:] if argv is None else argv)
        args = resolve_for_plan(args)
        model = ModelConfig.from_path(args.model_path)
        memory = device_budget(args)
        if output.plot is not None:
            check_plot_path(output.plot)
    except (ValueError, OSError) as error:
        print(f"sglang plan: {error}", file=sys.stderr)
        return BAD_ARGUMENTS
    asked = "lossless" if args.enable_linear_lossless_verify else "default"
    plans = plan_both(model, args)
    print((_as_json if output.json else _as_text)(args, asked, plans))
    if output.plot is not None:
        try:
            draw(model, args, memory, output.plot)
        except PlotError as error:
            print(f"sglang plan: {error}", file=sys.stderr)
            return BAD_ARGUMENTS
    return 0 if isinstance(plans[asked], MemoryPlan) else NO_PLAN


if __name__ == "__main__":
    raise SystemExit(main())
