"""What a plan refuses and what it remarks on: bytes needed, bytes available, and the flag to move."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sglang.srt.mem_cache.plan_gather import PlanInputs
from sglang.srt.mem_cache.plan_inputs import MemoryPlanError
from sglang.srt.mem_cache.plan_reserves import ReserveLine
from sglang.srt.mem_cache.plan_table import human_bytes as _size
from sglang.srt.mem_cache.state_layout import SNAPSHOTS, UPDATE_TUPLES
from sglang.srt.mem_cache.state_sizing import DEFAULT_MAMBA_SHARE, Division, StateCosts


def largest_fraction(inputs: PlanInputs, reserves: tuple[ReserveLine, ...]) -> float:
    """Largest static share, in thousandths, that leaves room for the reserves; may be negative."""
    reserved = sum(line.nbytes for line in reserves)
    return math.floor((1 - reserved / inputs.memory) * 1000) / 1000


def static_fraction(inputs: PlanInputs, reserves: tuple[ReserveLine, ...]) -> float:
    """The flag's fraction if it leaves room for the reserves, else the largest that does."""
    reserved = sum(line.nbytes for line in reserves)
    largest = largest_fraction(inputs, reserves)
    asked = inputs.args.mem_fraction_static
    if asked is None:
        if largest <= 0:
            raise MemoryPlanError(
                f"activations, graphs and runtime need {_size(reserved)}, the device has "
                f"{_size(inputs.memory)}: {_fewer_rows(inputs)}, or use a larger device "
                "(--device-memory-gb when planning)"
            )
        return largest
    if asked > largest:
        lower = f"lower it to at most {largest:.3f}, or " if largest > 0 else ""
        raise MemoryPlanError(
            f"--mem-fraction-static {asked} leaves {_size(inputs.memory * (1 - asked))} for "
            f"activations, graphs and runtime, which need {_size(reserved)}: {lower}"
            f"{_fewer_rows(inputs)}"
        )
    return asked


def _fewer_rows(inputs: PlanInputs) -> str:
    """The flags that set how many rows a call computes, with their values."""
    return f"lower --chunked-prefill-size {inputs.args.chunked_prefill_size} or {_running(inputs)}"


def _running(inputs: PlanInputs) -> str:
    return f"--max-running-requests {inputs.max_running}"


def least_tokens(inputs: PlanInputs) -> int:
    """Fewest KV tokens with which anything can run: one prompt token and one step's tail."""
    page = inputs.page_size
    return -(-(1 + inputs.draft.tail_tokens) // page) * page


@dataclass(frozen=True)
class Budget:
    """What there is: ``static_bytes``, of which weights and request rows take ``fixed``."""

    static_bytes: int
    fixed: int
    largest_fraction: float


def check_fits(
    inputs: PlanInputs, costs: StateCosts, division: Division, tokens: int, budget: Budget
) -> None:
    """Raise MemoryPlanError when no request could run, with bytes and the flag to move.

    ``tokens`` are the KV tokens that ``division`` leaves.
    """
    args, state = inputs.args, division.state
    least = least_tokens(inputs)
    if args.max_total_tokens is not None and args.max_total_tokens < least:
        raise MemoryPlanError(
            f"--max-total-tokens {args.max_total_tokens} holds no request: a page of "
            f"{inputs.page_size} tokens and one step need {least}; raise it"
        )
    if state.slots < inputs.ratio and state.branch != 3:
        raise MemoryPlanError(
            f"--max-mamba-cache-size {args.max_mamba_cache_size} serves no request: it gives "
            f"{_size(state.slots * costs.slot)}, and each request needs {inputs.ratio} state slots "
            f"({_size(inputs.ratio * costs.slot)}); raise it to at least {inputs.ratio}, or use "
            "--disable-radix-cache, which needs one"
        )
    have = f"{_size(budget.static_bytes)} are available"
    needed = _enough(inputs, costs, division, budget)
    more = _more_memory(inputs, needed, budget)
    if budget.static_bytes <= budget.fixed:
        raise MemoryPlanError(
            f"weights, draft weights and request rows need {_size(budget.fixed)}, {have}: {more}, or "
            f"lower --context-length {inputs.context} or {_running(inputs)}"
        )
    if state.slots < inputs.ratio:
        raise MemoryPlanError(
            f"recurrent state needs {_size(_one_request(inputs, costs))} for one request "
            f"({inputs.ratio} slots, padding, two verify rows); its share beside weights of "
            f"{_size(budget.fixed)} is less: {_size(needed)} are needed in all, {have}: {more}"
            f"{_lossless_hint(inputs)}, raise --mamba-full-memory-ratio above {_share(inputs):g}, or "
            f"set --max-mamba-cache-size {inputs.ratio}"
        )
    if tokens < least:
        rows = f", {state.rows} verify rows" if inputs.verifies else ""
        raise MemoryPlanError(
            f"no memory is left for KV: weights, {state.slots} state slots{rows} and {least} tokens "
            f"need {_size(needed)}, {have}: {more}, or lower {_state_flag(inputs, state.branch)}"
            f"{_lossless_hint(inputs)}{_narrower_hint(inputs)}"
        )


def _state_flag(inputs: PlanInputs, branch: int) -> str:
    """The flag that made the state pool as large as it is."""
    if branch == 1:
        return f"--max-mamba-cache-size {inputs.args.max_mamba_cache_size}"
    return _running(inputs) if branch == 2 else f"--mamba-full-memory-ratio {_share(inputs):g}"


def _narrower_hint(inputs: PlanInputs) -> str:
    if not inputs.verifies:
        return ""
    return f", lower --speculative-num-draft-tokens {inputs.args.speculative_num_draft_tokens}"


def _share(inputs: PlanInputs) -> float:
    weight = inputs.args.mamba_full_memory_ratio
    return DEFAULT_MAMBA_SHARE if weight is None else weight


def _one_request(inputs: PlanInputs, costs: StateCosts) -> int:
    """Bytes of the smallest state pool that runs anything."""
    return (inputs.ratio + 1) * (costs.slot + costs.extra) + 2 * costs.row


def _enough(inputs: PlanInputs, costs: StateCosts, division: Division, budget: Budget) -> int:
    """Static bytes with which the same flags would run one request."""
    kv = (least_tokens(inputs) + inputs.page_size) * inputs.bytes_per_token
    if division.state.branch != 3:
        return budget.fixed + division.state.charged + kv
    share = _share(inputs)
    state = _one_request(inputs, costs) + costs.slot
    return budget.fixed + math.ceil(max(state * (1 + share) / share, kv * (1 + share), state + kv))


def _more_memory(inputs: PlanInputs, needed: int, budget: Budget) -> str:
    """The way to ``needed`` bytes: a larger fraction, if there is one, else more hardware."""
    fraction = math.ceil(1000 * needed / inputs.memory) / 1000
    if fraction <= budget.largest_fraction:
        return f"raise --mem-fraction-static to at least {fraction:.3f}"
    return "use a larger device, a larger --tp-size or a smaller model"


def _lossless_hint(inputs: PlanInputs) -> str:
    if not inputs.verifies or inputs.args.enable_linear_lossless_verify:
        return ""
    return ", turn on --enable-linear-lossless-verify"


def plan_notes(
    inputs: PlanInputs, num_requests: int, tokens: int, largest: int, charged: int, scratch: int
) -> tuple[str, ...]:
    notes = []
    if num_requests < inputs.max_running:
        need = inputs.max_running * inputs.ratio
        notes.append(
            f"--max-running-requests {inputs.max_running} becomes {num_requests}: the state pool "
            f"serves no more at {inputs.ratio} slots each; raise --max-mamba-cache-size to {need}"
        )
    if largest < inputs.context:
        price, rows = inputs.bytes_per_token, inputs.draft_tokens or 1
        notes.append(
            f"the longest request that can run is {largest} tokens, below the context length "
            f"{inputs.context}, whose KV needs {_size((inputs.context + rows) * price)} with the rows "
            f"of a step while {_size(tokens * price)} are there: raise --max-total-tokens or the memory, or lower "
            "--context-length"
        )
    if inputs.args.enable_linear_lossless_verify and inputs.verifies:
        if inputs.scratch_row(UPDATE_TUPLES) >= inputs.scratch_row(SNAPSHOTS):
            notes.append(
                "update tuples are not smaller than snapshots at these head dims: "
                "--enable-linear-lossless-verify frees nothing here"
            )
    elif charged > scratch:
        notes.append(
            f"verify scratch is charged {_size(charged)} and takes {_size(scratch)}: conv windows "
            "share columns, the price does not"
        )
    return tuple(notes)
