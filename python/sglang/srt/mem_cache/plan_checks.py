"""What a plan refuses and what it remarks on: bytes needed, bytes available, and the flag to move."""

from __future__ import annotations

import math

from sglang.srt.mem_cache.plan_gather import PlanInputs
from sglang.srt.mem_cache.plan_inputs import MemoryPlanError
from sglang.srt.mem_cache.plan_reserves import ReserveLine
from sglang.srt.mem_cache.state_layout import SNAPSHOTS, UPDATE_TUPLES
from sglang.srt.mem_cache.state_sizing import GIB, Division, StateCosts


def static_fraction(inputs: PlanInputs, reserves: tuple[ReserveLine, ...]) -> float:
    """The flag's fraction if it leaves room for the reserves, else the largest that does."""
    reserved = sum(line.nbytes for line in reserves)
    largest = math.floor((1 - reserved / inputs.memory) * 1000) / 1000
    asked = inputs.args.mem_fraction_static
    if asked is None:
        if largest <= 0:
            raise MemoryPlanError(
                f"activations, graphs and runtime need {_gib(reserved)}, the device has "
                f"{_gib(inputs.memory)}: lower --chunked-prefill-size or --max-running-requests, or "
                "use a larger device"
            )
        return largest
    if asked > largest:
        raise MemoryPlanError(
            f"--mem-fraction-static {asked} leaves {_gib(inputs.memory * (1 - asked))} for "
            f"activations, graphs and runtime, which need {_gib(reserved)}: lower it to at most "
            f"{max(largest, 0):.3f}, or lower --chunked-prefill-size or --max-running-requests"
        )
    return asked


def least_tokens(inputs: PlanInputs) -> int:
    """Fewest KV tokens with which anything can run: one prompt token and one step's tail."""
    page = inputs.args.page_size
    return -(-(1 + inputs.draft.tail_tokens) // page) * page


def check_fits(
    inputs: PlanInputs,
    costs: StateCosts,
    division: Division,
    tokens: int,
    *,
    rest: int,
    fraction: float,
    fixed: int,
) -> None:
    args, state = inputs.args, division.state
    static = _gib(inputs.memory * fraction)
    least = least_tokens(inputs)
    kv_needed = (least + args.page_size) * inputs.bytes_per_token
    if args.max_total_tokens is not None and args.max_total_tokens < least:
        raise MemoryPlanError(
            f"--max-total-tokens {args.max_total_tokens} holds no request: a page of "
            f"{args.page_size} tokens and one step need {least}; raise it"
        )
    slots = max(state.slots, inputs.ratio)
    rows = 2 if costs.has_scratch else 0
    needed = fixed + (slots + 1) * costs.slot + max(state.rows, rows) * costs.row + kv_needed
    enough = min(needed / inputs.memory, 1.0)
    way_out = (
        f"raise --mem-fraction-static to at least {math.ceil(enough * 1000) / 1000:.3f}"
        if needed < inputs.memory * 0.98
        else "use a larger device, more --tp-size or a smaller model"
    )
    if rest <= 0:
        raise MemoryPlanError(
            f"weights, draft weights and request rows need {_gib(fixed)}, --mem-fraction-static "
            f"{fraction:.3f} of {_gib(inputs.memory)} gives {static}: {way_out}, or lower "
            "--context-length or --max-running-requests"
        )
    if state.branch == 3 and state.slots < inputs.ratio:
        raise MemoryPlanError(
            f"one request needs {inputs.ratio} state slots of {_gib(costs.slot)} and two verify rows "
            f"of {_gib(costs.row)}; with weights, rows and one page of KV that is {_gib(needed)}, "
            f"but {static} are available: {way_out}{_lossless_hint(inputs)}, raise "
            "--mamba-full-memory-ratio, or set --max-mamba-cache-size"
        )
    if state.slots < inputs.ratio:
        raise MemoryPlanError(
            f"--max-mamba-cache-size {args.max_mamba_cache_size} serves no request: each needs "
            f"{inputs.ratio} state slots ({inputs.ratio * costs.slot} bytes); raise it to at least "
            f"{inputs.ratio}, or use --disable-radix-cache, which needs one"
        )
    if tokens < least:
        lower = "--max-running-requests" if state.branch == 2 else "--max-mamba-cache-size"
        raise MemoryPlanError(
            f"no memory is left for KV: weights, {state.slots} state slots, {state.rows} verify rows "
            f"and {least} tokens need {_gib(needed)}, {static} are available: {way_out}, lower "
            f"{lower}{_lossless_hint(inputs)} or lower --speculative-num-draft-tokens"
        )


def _lossless_hint(inputs: PlanInputs) -> str:
    if not inputs.verifies or inputs.args.enable_linear_lossless_verify:
        return ""
    return ", turn on --enable-linear-lossless-verify"


def plan_notes(
    inputs: PlanInputs, num_requests: int, largest: int, context: int, charged: int, scratch: int
) -> tuple[str, ...]:
    notes = []
    if num_requests < inputs.max_running:
        need = inputs.max_running * inputs.ratio
        notes.append(
            f"--max-running-requests {inputs.max_running} becomes {num_requests}: the state pool "
            f"serves no more at {inputs.ratio} slots each; raise --max-mamba-cache-size to {need}"
        )
    if largest < context:
        notes.append(
            f"the longest request that can run is {largest} tokens, below the context length "
            f"{context}: raise --max-total-tokens or the memory, or lower --context-length"
        )
    if inputs.args.enable_linear_lossless_verify and inputs.verifies:
        if inputs.scratch_row(UPDATE_TUPLES) >= inputs.scratch_row(SNAPSHOTS):
            notes.append(
                "update tuples are not smaller than snapshots at these head dims: "
                "--enable-linear-lossless-verify frees nothing here"
            )
    elif charged > scratch:
        notes.append(
            f"verify scratch is charged {_gib(charged)} and takes {_gib(scratch)}: conv windows "
            "share columns, the price does not"
        )
    return tuple(notes)


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.2f} GiB"
