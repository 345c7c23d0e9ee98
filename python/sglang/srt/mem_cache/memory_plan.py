"""One plan of a rank's memory: computed from config and flags, printed, and built from. No torch."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sglang.srt.configs.draft_config import DraftConfig
from sglang.srt.configs.model_config import FULL_ATTENTION, LINEAR_ATTENTION, ModelConfig
from sglang.srt.mem_cache.plan_inputs import (
    DraftNeeds,
    KVGeometry,
    MemoryPlanError,
    draft_needs,
    full_attention_layers,
    kv_geometry,
    max_draft_tokens,
    request_slot_ratio,
    stage_counts,
    stage_layers,
    state_layout,
    target_weight_size,
)
from sglang.srt.mem_cache.plan_reserves import ReserveLine, runtime_reserves
from sglang.srt.mem_cache.state_layout import (
    SNAPSHOTS,
    UPDATE_TUPLES,
    StateLayout,
    TensorSpec,
    total_bytes,
)
from sglang.srt.mem_cache.state_sizing import (
    GIB,
    Division,
    StateCosts,
    StateRequest,
    divide,
    divide_lossless,
)
from sglang.srt.mem_cache.tensor_lists import kv_tensor_specs, num_track_entries, req_tensor_specs

if TYPE_CHECKING:
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.pool.kv_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.pool.req_pool import HybridReqToTokenPool
    from sglang.srt.server_args import ServerArgs

DEFAULT_MAX_RUNNING = {"cuda": 128, "cpu": 16}
"""Used where neither the flag nor speculative decoding sets ``--max-running-requests``."""
CPU_TOTAL_TOKENS = 32768
"""KV tokens of a CPU server unless ``--max-total-tokens`` asks for more; keeps small servers small."""
CPU_SPARE_STATES = 64
"""State slots of a CPU server beyond those of running requests, for the prefix tree."""
CPU_MEMORY_SHARE = 0.5
"""Share of the host's available memory that a CPU server plans with unless a flag says otherwise."""
ROW_SLACK = 4
"""Positions a request row has beyond context and draft tail."""


@dataclass(frozen=True)
class PoolSettings:
    """How the pools of this rank are built; every number is final."""

    linear_layer_ids: tuple[int, ...]
    layout: StateLayout
    kv: KVGeometry
    draft_kv: KVGeometry | None
    tp_size: int
    num_requests: int
    max_context_len: int
    track_entries: int
    extra_buffer: bool
    lazy: bool
    overlap: bool
    topk: int | None


@dataclass(frozen=True)
class MemoryPlan:
    """Sizes of one rank. Bytes are exact except ``reserves``, which are estimates.

    ``static_bytes`` (device memory times ``mem_fraction_static``) pays for weights and ``tensors``;
    ``reserves`` must fit beside it. ``max_running_requests`` is the effective value: what the state
    slots serve. ``verify_scratch_bytes`` is allocated, ``verify_scratch_charged_bytes`` is what the
    sizing set aside for it. ``largest_request_tokens`` is the longest prompt plus answer that can
    run alone.
    """

    device: str
    device_memory_bytes: int
    mem_fraction_static: float
    static_bytes: int
    reserves: tuple[ReserveLine, ...]
    weight_bytes: int
    draft_weight_bytes: int
    lossless_verify: bool
    draft_tokens: int | None
    verify_rows: int
    verify_scratch_bytes: int
    verify_ssm_scratch_bytes: int
    verify_scratch_charged_bytes: int
    lossless_freed_bytes: int
    state_slot_bytes: int
    max_mamba_cache_size: int
    slots_per_request: int
    sizing_branch: int
    requested_max_running_requests: int
    max_running_requests: int
    kv_bytes_per_token: int
    draft_kv_bytes_per_token: int
    page_size: int
    max_total_num_tokens: int
    context_length: int
    largest_request_tokens: int
    conv_dtype: str
    ssm_dtype: str
    kv_dtype: str
    tensors: tuple[TensorSpec, ...]
    notes: tuple[str, ...]
    settings: PoolSettings

    @property
    def pool_bytes(self) -> int:
        """Bytes of all tensors that the pools allocate."""
        return total_bytes(self.tensors)

    @property
    def unspent_bytes(self) -> int:
        """Static memory that neither weights nor pools use: rounding, and limits set by flags."""
        return self.static_bytes - self.weight_bytes - self.draft_weight_bytes - self.pool_bytes

    def to_dict(self) -> dict[str, object]:
        """Every number under its name, as JSON can hold it."""
        values = dataclasses.asdict(self)
        del values["settings"]
        values["tensors"] = [
            {"name": t.name, "shape": list(t.shape), "dtype": t.dtype, "bytes": t.nbytes}
            for t in self.tensors
        ]
        values["pool_bytes"] = self.pool_bytes
        values["unspent_bytes"] = self.unspent_bytes
        return values


@dataclass(frozen=True)
class Pools:
    """The pools of one rank. ``draft_kv_pool`` shares slot ids with ``kv_pool``; None without drafts."""

    req_pool: HybridReqToTokenPool
    token_allocator: PagedTokenToKVPoolAllocator
    kv_pool: MHATokenToKVPool
    draft_kv_pool: MHATokenToKVPool | None

    def check_integrity(self) -> None:
        """Raise IntegrityError when any owner's books do not balance."""
        for owner in (self.req_pool, self.token_allocator, self.kv_pool, self.draft_kv_pool):
            if owner is not None:
                owner.check_integrity()


@dataclass(frozen=True)
class _Inputs:
    """Everything that is fixed before the budget is divided."""

    model: ModelConfig
    args: ServerArgs
    memory: int
    draft_tokens: int | None
    draft: DraftNeeds
    layout: StateLayout
    kv: KVGeometry
    weight_bytes: int
    max_running: int
    row_len: int
    track_entries: int
    ratio: int

    @property
    def verifies(self) -> bool:
        """Whether this worker records verify scratch; a prefill server never verifies."""
        return self.draft_tokens is not None and self.args.disaggregation_mode != "prefill"

    @property
    def bytes_per_token(self) -> int:
        draft = self.draft.kv
        return self.kv.bytes_per_token + (draft.bytes_per_token if draft is not None else 0)

    @property
    def row_bytes(self) -> int:
        return total_bytes(self.row_tensors(self.max_running))

    def row_tensors(self, num_requests: int) -> list[TensorSpec]:
        return req_tensor_specs(
            size=num_requests, max_context_len=self.row_len, track_entries=self.track_entries
        )

    def scratch_row(self, kind: str) -> int:
        """Bytes one verify row really takes."""
        if not self.verifies:
            return 0
        return self.layout.scratch_row_bytes(kind=kind, draft_tokens=self.draft_tokens)

    def charged_row(self, kind: str) -> int:
        """Bytes one verify row is charged.

        Snapshots keep their customary price of one whole state per configured draft token, unless
        the rows really take more (adaptive widths).
        """
        allocated = self.scratch_row(kind)
        if kind == UPDATE_TUPLES or not self.verifies:
            return allocated
        stock = self.layout.slot_bytes() * self.args.speculative_num_draft_tokens
        return max(allocated, stock)


def make_plan(
    model_config: ModelConfig,
    server_args: ServerArgs,
    *,
    device_memory_bytes: int,
    draft_config: DraftConfig | None = None,
    pp_rank: int = 0,
) -> MemoryPlan:
    """Plan one rank's memory. Pure: nothing is allocated, and no device is needed.

    ``server_args`` must be resolved. ``device_memory_bytes`` is the memory of one device, or on a CPU
    what the server may use (see ``default_host_budget``); ``--device-memory-gb`` wins over it. All
    ranks get the same slots and tokens, sized for the fullest one.
    Raises: MemoryPlanError with bytes needed, bytes available, and the flag to move.
    """
    inputs = _gather(model_config, server_args, device_memory_bytes, draft_config)
    reserves = runtime_reserves(
        model_config,
        server_args,
        max_running=inputs.max_running,
        draft_tokens=inputs.draft_tokens,
    )
    fraction = _static_fraction(inputs, reserves)
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
    _check_fits(inputs, costs, division, tokens, rest=rest, fraction=fraction, fixed=fixed)
    return _assemble(inputs, division, tokens, reserves, fraction, static_bytes, pp_rank)


def default_host_budget() -> int:
    """Bytes that a CPU server plans with: half of the memory available on this host now.

    A container's limit counts where there is one.
    """
    available = _meminfo("MemAvailable")
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as limit_file:
            limit = limit_file.read().strip()
        with open("/sys/fs/cgroup/memory.current", encoding="ascii") as used_file:
            used = int(used_file.read())
    except OSError:
        limit, used = "max", 0
    if limit.isdigit():
        available = min(available, max(0, int(limit) - used))
    return int(available * CPU_MEMORY_SHARE)


def _meminfo(key: str) -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    raise MemoryPlanError(f"/proc/meminfo has no {key}; give --device-memory-gb")


def _gather(
    model: ModelConfig, args: ServerArgs, memory: int, draft_config: DraftConfig | None
) -> _Inputs:
    if args.device_memory_gb is not None:
        memory = int(args.device_memory_gb * GIB)
    draft_tokens = max_draft_tokens(args)
    draft = draft_needs(model, draft_config, args, draft_tokens)
    context = args.context_length or model.max_position_embeddings
    page = args.page_size
    row_len = -(-(context + draft.tail_tokens + ROW_SLACK) // page) * page
    topk = args.speculative_eagle_topk
    extra_buffer = args.mamba_radix_cache_strategy in ("extra_buffer", "extra_buffer_lazy")
    return _Inputs(
        model=model,
        args=args,
        memory=memory,
        draft_tokens=draft_tokens,
        draft=draft,
        layout=state_layout(
            model,
            args,
            num_layers=stage_counts(model, args.pp_size, LINEAR_ATTENTION),
            chain=topk is None or topk <= 1,
        ),
        kv=kv_geometry(model, args, full_attention_layers(model, args.pp_size)),
        weight_bytes=target_weight_size(model, args).nbytes,
        max_running=args.max_running_requests or DEFAULT_MAX_RUNNING.get(args.device, 128),
        row_len=row_len,
        track_entries=num_track_entries(
            extra_buffer=extra_buffer and not args.disable_radix_cache,
            lazy=args.mamba_radix_cache_strategy == "extra_buffer_lazy",
            overlap=not args.disable_overlap_schedule,
        ),
        ratio=request_slot_ratio(args),
    )


def _static_fraction(inputs: _Inputs, reserves: tuple[ReserveLine, ...]) -> float:
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


def _divide(inputs: _Inputs, costs: StateCosts, rest: int) -> Division:
    args = inputs.args
    limit = None
    if args.device == "cpu":
        limit = inputs.max_running * inputs.ratio + CPU_SPARE_STATES
    ratio = args.mamba_full_memory_ratio
    request = StateRequest(
        max_mamba_cache_size=args.max_mamba_cache_size,
        max_running_requests=inputs.max_running,
        radix_cache=not args.disable_radix_cache,
        full_memory_ratio=0.9 if ratio is None else ratio,
        slot_limit=limit,
    )
    if args.enable_linear_lossless_verify and costs.has_scratch:
        return divide_lossless(costs, inputs.charged_row(SNAPSHOTS), request, rest)
    return divide(costs, request, rest)


def _kv_tokens(inputs: _Inputs, kv_bytes: int) -> int:
    """Whole pages that ``kv_bytes`` buy beside the padding page, bounded by the flags."""
    page = inputs.args.page_size
    pages = kv_bytes // (inputs.bytes_per_token * page) - 1
    limit = inputs.args.max_total_tokens
    if limit is None and inputs.args.device == "cpu":
        limit = CPU_TOTAL_TOKENS
    if limit is not None:
        pages = min(pages, limit // page)
    return max(0, pages) * page


def _least_tokens(inputs: _Inputs) -> int:
    """Fewest KV tokens with which anything can run: one prompt token and one step's tail."""
    page = inputs.args.page_size
    return -(-(1 + inputs.draft.tail_tokens) // page) * page


def _check_fits(
    inputs: _Inputs,
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
    least = _least_tokens(inputs)
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


def _lossless_hint(inputs: _Inputs) -> str:
    if not inputs.verifies or inputs.args.enable_linear_lossless_verify:
        return ""
    return ", turn on --enable-linear-lossless-verify"


def _assemble(
    inputs: _Inputs,
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
    scratch = rank_layout.scratch_tensors(
        kind=kind, rows=rows, draft_tokens=inputs.draft_tokens or 1
    )
    ssm = rank_layout.ssm_scratch_tensors(
        kind=kind, rows=rows, draft_tokens=inputs.draft_tokens or 1
    )
    charged = rows * inputs.charged_row(kind)
    freed = rows * (inputs.charged_row(SNAPSHOTS) - inputs.charged_row(UPDATE_TUPLES))
    context = args.context_length or inputs.model.max_position_embeddings
    largest = min(context, tokens - inputs.draft.tail_tokens)
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
        lossless_freed_bytes=freed,
        state_slot_bytes=layout.slot_bytes(),
        max_mamba_cache_size=state.slots,
        slots_per_request=inputs.ratio,
        sizing_branch=state.branch,
        requested_max_running_requests=inputs.max_running,
        max_running_requests=num_requests,
        kv_bytes_per_token=inputs.kv.bytes_per_token,
        draft_kv_bytes_per_token=inputs.bytes_per_token - inputs.kv.bytes_per_token,
        page_size=args.page_size,
        max_total_num_tokens=tokens,
        context_length=context,
        largest_request_tokens=largest,
        conv_dtype=layout.conv_dtype,
        ssm_dtype=layout.temporal_dtype,
        kv_dtype=inputs.kv.dtype,
        tensors=_tensors(inputs, settings, state.slots, scratch if rows else [], tokens),
        notes=_notes(inputs, num_requests, largest, context, charged, total_bytes(scratch)),
        settings=settings,
    )


def _settings(inputs: _Inputs, num_requests: int, pp_rank: int) -> PoolSettings:
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
        max_context_len=inputs.row_len,
        track_entries=inputs.track_entries,
        extra_buffer=extra_buffer,
        lazy=extra_buffer and args.mamba_radix_cache_strategy == "extra_buffer_lazy",
        overlap=not args.disable_overlap_schedule,
        topk=args.speculative_eagle_topk if args.speculative_algorithm is not None else None,
    )


def _tensors(
    inputs: _Inputs,
    settings: PoolSettings,
    slots: int,
    scratch: list[TensorSpec],
    tokens: int,
) -> tuple[TensorSpec, ...]:
    """Every tensor of the pools, named by owner."""
    page = inputs.args.page_size
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


def _notes(
    inputs: _Inputs, num_requests: int, largest: int, context: int, charged: int, scratch: int
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
