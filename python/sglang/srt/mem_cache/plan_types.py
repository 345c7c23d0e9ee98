"""The memory plan of one rank, and the pools built from it, as values. No torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.plan_inputs import KVGeometry
from sglang.srt.mem_cache.plan_reserves import ReserveLine
from sglang.srt.mem_cache.plan_table import format_plan
from sglang.srt.mem_cache.state_layout import StateLayout, TensorSpec, total_bytes

if TYPE_CHECKING:
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.pool.kv_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.pool.req_pool import HybridReqToTokenPool


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
    ring_cells: int | None


@dataclass(frozen=True)
class MemoryPlan:
    """Sizes of one rank. Bytes are exact except ``reserves``, which are estimates.

    ``static_bytes`` (device memory times ``mem_fraction_static``) pays for weights and ``tensors``;
    ``reserves`` must fit beside it. ``max_running_requests`` is the effective value: what the state
    slots serve. ``verify_scratch_bytes`` is allocated, ``verify_scratch_charged_bytes`` is what the
    sizing set aside for it. ``largest_request_tokens`` is the longest prompt plus answer that can
    run alone. ``lossless_bytes_freed`` is what update tuples save against snapshots; 0 while off.
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
    lossless_bytes_freed: int
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

    @property
    def num_state_slots(self) -> int:
        """State slots that can be handed out."""
        return self.max_mamba_cache_size

    def describe(self) -> str:
        """The plan as lines for the log."""
        return format_plan(self)

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
