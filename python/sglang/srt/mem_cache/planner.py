"""The planner that the server and ``sglang plan`` share: config and flags to a MemoryPlan. No torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sglang.srt.configs.draft_config import DraftConfig
from sglang.srt.configs.model_config import FULL_ATTENTION, LINEAR_ATTENTION, ModelConfig
from sglang.srt.mem_cache.device_memory import planned_memory
from sglang.srt.mem_cache.plan_checks import (
    Budget,
    check_fits,
    largest_fraction,
    plan_notes,
    static_fraction,
)
from sglang.srt.mem_cache.plan_gather import PlanInputs, gather
from sglang.srt.mem_cache.plan_inputs import KVGeometry, stage_layers
from sglang.srt.mem_cache.plan_reserves import ReserveLine, runtime_reserves
from sglang.srt.mem_cache.plan_types import MemoryPlan, PoolSettings
from sglang.srt.mem_cache.state_layout import SNAPSHOTS, UPDATE_TUPLES, TensorSpec, total_bytes
from sglang.srt.mem_cache.state_sizing import (
    DEFAULT_MAMBA_SHARE,
    Division,
    StateCosts,
    StateRequest,
    divide,
    divide_lossless,
)
from sglang.srt.mem_cache.tensor_lists import kv_tensor_specs

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

CPU_TOTAL_TOKENS = 32768
"""KV tokens of a CPU server unless ``--max-total-tokens`` asks for more; keeps small servers small."""
CPU_SPARE_STATES = 64
"""State slots of a CPU server beyond those of running requests, for the prefix tree."""


def make_plan(
    model_config: ModelConfig,
    server_args: ServerArgs,
    *,
    device_memory_bytes: int | None = None,
    draft_config: DraftConfig | None = None,
    pp_rank: int = 0,
) -> MemoryPlan:
    """Plan one rank's memory. Nothing is allocated.

    ``server_args`` must be resolved. ``device_memory_bytes`` is the memory of one device, or on a CPU
    what the server may use. Without it ``--device-memory-gb`` counts, and without that the memory
    that the device has; only then is the device looked at. All ranks get the same slots and tokens,
    sized for the fullest one.
    Raises: MemoryPlanError with bytes needed, bytes available, and the flag to move.
    """
    memory = device_memory_bytes or planned_memory(server_args)
    inputs = gather(model_config, server_args, memory, draft_config)
    reserves = runtime_reserves(
        model_config,
        server_args,
        max_running=inputs.max_running,
        draft_tokens=inputs.draft_tokens,
        attention_shapes=inputs.attention_shapes,
    )
    fraction = static_fraction(inputs, reserves)
    static_bytes = int(inputs.memory * fraction)
    fixed = inputs.weight_bytes + inputs.draft.weights.nbytes + inputs.row_bytes
    rest = static_bytes - fixed
    lossless = server_args.enable_linear_lossless_verify
    costs = StateCosts(
        slot=inputs.layout.slot_bytes(),
        row=inputs.charged_row(UPDATE_TUPLES if lossless else SNAPSHOTS),
        ratio=inputs.ratio,
    )
    division = _divide(inputs, costs, rest)
    tokens = _kv_tokens(inputs, division.kv_bytes)
    budget = Budget(static_bytes, fixed, largest_fraction(inputs, reserves))
    check_fits(inputs, costs, division, tokens, budget)
    return _assemble(inputs, division, tokens, reserves, fraction, static_bytes, pp_rank)


def _divide(inputs: PlanInputs, costs: StateCosts, rest: int) -> Division:
    args = inputs.args
    limit = None
    if args.device == "cpu":
        limit = inputs.max_running * inputs.ratio + CPU_SPARE_STATES
    ratio = args.mamba_full_memory_ratio
    request = StateRequest(
        max_mamba_cache_size=args.max_mamba_cache_size,
        max_running_requests=inputs.max_running,
        radix_cache=not args.disable_radix_cache,
        full_memory_ratio=DEFAULT_MAMBA_SHARE if ratio is None else ratio,
        slot_limit=limit,
        running_is_default=args.max_running_requests is None,
    )
    if args.enable_linear_lossless_verify and costs.has_scratch:
        return divide_lossless(costs, inputs.charged_row(SNAPSHOTS), request, rest)
    return divide(costs, request, rest)


def _kv_tokens(inputs: PlanInputs, kv_bytes: int) -> int:
    """Whole pages that ``kv_bytes`` buy beside the padding page, bounded by the flags."""
    page = inputs.page_size
    pages = kv_bytes // (inputs.bytes_per_token * page) - 1
    limit = inputs.args.max_total_tokens
    if limit is None and inputs.args.device == "cpu":
        limit = CPU_TOTAL_TOKENS
    if limit is not None:
        pages = min(pages, limit // page)
    return max(0, pages) * page


def _assemble(
    inputs: PlanInputs,
    division: Division,
    tokens: int,
    reserves: tuple[ReserveLine, ...],
    fraction: float,
    static_bytes: int,
    pp_rank: int,
) -> MemoryPlan:
    args, state, layout = inputs.args, division.state, inputs.layout
    num_requests = min(inputs.max_running, state.slots // inputs.ratio)
    kind = UPDATE_TUPLES if args.enable_linear_lossless_verify else SNAPSHOTS
    rows = num_requests + 1 if inputs.verifies else 0
    settings = _settings(inputs, num_requests, pp_rank)
    rank_layout = settings.layout
    width = inputs.draft_tokens or 1
    cells = inputs.ring_cells
    scratch = rank_layout.scratch_tensors(
        kind=kind, rows=rows, draft_tokens=width, ring_cells=cells
    )
    ssm = rank_layout.ssm_scratch_tensors(
        kind=kind, rows=rows, draft_tokens=width, ring_cells=cells
    )
    charged = rows * inputs.charged_row(kind)
    freed = rows * inputs.charged_row(SNAPSHOTS) - charged
    context = inputs.context
    # The context is what a request may have; the pool also holds the rows of a step behind it.
    largest = min(context, tokens - width)
    return MemoryPlan(
        device=args.device,
        device_memory_bytes=inputs.memory,
        mem_fraction_static=fraction,
        static_bytes=static_bytes,
        reserves=reserves,
        weight_bytes=inputs.weight_bytes,
        draft_weight_bytes=inputs.draft.weights.nbytes,
        lossless_verify=args.enable_linear_lossless_verify,
        draft_tokens=inputs.draft_tokens if inputs.verifies else None,
        verify_rows=rows,
        verify_scratch_bytes=total_bytes(scratch) if rows else 0,
        verify_ssm_scratch_bytes=total_bytes(ssm) if rows else 0,
        verify_scratch_charged_bytes=charged,
        lossless_bytes_freed=freed,
        state_slot_bytes=layout.slot_bytes(),
        max_mamba_cache_size=state.slots,
        slots_per_request=inputs.ratio,
        sizing_branch=state.branch,
        requested_max_running_requests=inputs.max_running,
        max_running_requests=num_requests,
        kv_bytes_per_token=inputs.kv.bytes_per_token,
        draft_kv_bytes_per_token=inputs.bytes_per_token - inputs.kv.bytes_per_token,
        page_size=inputs.page_size,
        max_total_num_tokens=tokens,
        context_length=context,
        largest_request_tokens=largest,
        conv_dtype=layout.conv_dtype,
        ssm_dtype=layout.temporal_dtype,
        kv_dtype=inputs.kv.dtype,
        tensors=_tensors(inputs, settings, state.slots, scratch if rows else [], tokens),
        notes=plan_notes(inputs, num_requests, tokens, largest, charged, total_bytes(scratch)),
        settings=settings,
    )


def _settings(inputs: PlanInputs, num_requests: int, pp_rank: int) -> PoolSettings:
    args = inputs.args
    linear = stage_layers(inputs.model, args.pp_size, LINEAR_ATTENTION)[pp_rank]
    full = stage_layers(inputs.model, args.pp_size, FULL_ATTENTION)[pp_rank]
    extra_buffer = inputs.track_entries > 0
    return PoolSettings(
        linear_layer_ids=tuple(linear),
        layout=replace(inputs.layout, num_layers=len(linear)),
        kv=replace(inputs.kv, num_layers=len(full)),
        draft_kv=inputs.draft.kv,
        tp_size=args.tp_size,
        num_requests=num_requests,
        max_context_len=inputs.row_tokens,
        track_entries=inputs.track_entries,
        extra_buffer=extra_buffer,
        lazy=extra_buffer and args.mamba_radix_cache_strategy == "extra_buffer_lazy",
        overlap=not args.disable_overlap_schedule,
        topk=args.speculative_eagle_topk if args.speculative_algorithm is not None else None,
        ring_cells=inputs.ring_cells,
    )


def _tensors(
    inputs: PlanInputs,
    settings: PoolSettings,
    slots: int,
    scratch: list[TensorSpec],
    tokens: int,
) -> tuple[TensorSpec, ...]:
    """Every tensor of the pools, named by owner."""
    page = inputs.page_size
    groups = [
        ("req", inputs.row_tensors(settings.num_requests)),
        ("state", settings.layout.state_tensors(slots + 1) + scratch),
        ("kv", kv_tensors(settings.kv, tokens, page)),
    ]
    if settings.draft_kv is not None:
        groups.append(("draft_kv", kv_tensors(settings.draft_kv, tokens, page)))
    return tuple(
        replace(spec, name=f"{owner}.{spec.name}") for owner, specs in groups for spec in specs
    )


def kv_tensors(kv: KVGeometry, tokens: int, page_size: int) -> list[TensorSpec]:
    """Tensors of a KV pool of ``tokens`` slots and the padding page."""
    return kv_tensor_specs(
        size=tokens,
        page_size=page_size,
        dtype=kv.dtype,
        head_num=kv.num_heads,
        head_dim=kv.head_dim,
        layer_num=kv.num_layers,
    )
