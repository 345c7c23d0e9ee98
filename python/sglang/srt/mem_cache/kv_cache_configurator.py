"""From a memory plan to pools, and the sizing method whose name and rules others rely on."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sglang.srt.configs.linear_state import Mamba2StateShape
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.environ import envs
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_plan import (
    KVGeometry,
    MemoryPlan,
    Pools,
    default_host_budget,
    make_plan,
)
from sglang.srt.mem_cache.plan_inputs import MemoryPlanError, max_draft_tokens
from sglang.srt.mem_cache.pool import (
    HybridReqToTokenPool,
    MHATokenToKVPool,
    spec_intermediate_bytes_per_req,
)
from sglang.srt.mem_cache.state_sizing import (
    GIB,
    StateCosts,
    StateRequest,
    slots_per_request,
    solve,
)
from sglang.srt.mem_cache.weight_sizes import layer_ranges
from sglang.srt.runtime_context import get_context, get_disagg, get_exec, get_server_args

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

CUDA_ROUNDING_BYTES = 512
"""torch's CUDA allocator hands out multiples of this, so each tensor may cost up to that much more."""


def device_memory_bytes(device: str | torch.device) -> int:
    """Memory that a plan for ``device`` starts from: a GPU's total, or a share of the host's."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return default_host_budget()


def plan_for_device(
    model_config: ModelConfig, server_args: ServerArgs, *, device: str | torch.device
) -> MemoryPlan:
    """``make_plan`` with the memory of ``device``. Raises: MemoryPlanError."""
    return make_plan(model_config, server_args, device_memory_bytes=device_memory_bytes(device))


def plan_cache_params(plan: MemoryPlan) -> Mamba2CacheParams:
    """State parameters of the rank that ``plan`` describes."""
    layout = plan.settings.layout
    heads, v_dim, k_dim = layout.temporal
    channels, window = layout.conv[0]
    shape = Mamba2StateShape(
        conv=list(layout.conv),
        temporal=layout.temporal,
        intermediate_size=heads * v_dim,
        conv_dim=channels,
        ssm_state_size=k_dim,
        num_heads=heads,
        head_dim=v_dim,
        state_size=k_dim,
        conv_kernel=window + 1,
        num_k_heads_per_tp=layout.num_k_heads,
    )
    return Mamba2CacheParams(
        shape=shape,
        layers=list(plan.settings.linear_layer_ids),
        dtype=Mamba2StateDType(
            conv=getattr(torch, layout.conv_dtype), temporal=getattr(torch, layout.temporal_dtype)
        ),
    )


def build_pools(plan: MemoryPlan, device: str | torch.device) -> Pools:
    """Allocate exactly the tensors that ``plan`` lists, zeroed, on ``device``.

    Call ``check_allocated`` on the result before serving.
    """
    settings = plan.settings
    req_pool = HybridReqToTokenPool(
        size=settings.num_requests,
        mamba_size=plan.max_mamba_cache_size,
        mamba_spec_state_size=max(0, plan.verify_rows - 1),
        max_context_len=settings.max_context_len,
        device=device,
        enable_memory_saver=False,
        cache_params=plan_cache_params(plan),
        mamba_layer_ids=list(settings.linear_layer_ids),
        enable_mamba_extra_buffer=settings.extra_buffer,
        enable_mamba_extra_buffer_lazy=settings.lazy,
        enable_overlap_schedule=settings.overlap,
        speculative_num_draft_tokens=plan.draft_tokens,
        speculative_eagle_topk=settings.topk,
        enable_linear_lossless_verify=plan.lossless_verify,
    )
    return Pools(
        req_pool=req_pool,
        token_allocator=PagedTokenToKVPoolAllocator(plan.max_total_num_tokens, plan.page_size),
        kv_pool=_kv_pool(plan, settings.kv, device),
        draft_kv_pool=(
            None if settings.draft_kv is None else _kv_pool(plan, settings.draft_kv, device)
        ),
    )


def _kv_pool(plan: MemoryPlan, kv: KVGeometry, device: str | torch.device) -> MHATokenToKVPool:
    return MHATokenToKVPool(
        size=plan.max_total_num_tokens,
        page_size=plan.page_size,
        dtype=getattr(torch, kv.dtype),
        head_num=kv.num_heads,
        head_dim=kv.head_dim,
        layer_num=kv.num_layers,
        device=device,
    )


def _allocated_tensors(pools: Pools) -> dict[str, torch.Tensor]:
    req_names = ("req_to_token", "req_index_to_")
    tensors = {}
    for name, tensor in pools.req_pool.named_tensors().items():
        owner = "req" if name.startswith(req_names) else "state"
        tensors[f"{owner}.{name}"] = tensor
    owners = [("kv", pools.kv_pool)]
    if pools.draft_kv_pool is not None:
        owners.append(("draft_kv", pools.draft_kv_pool))
    for owner, pool in owners:
        tensors.update({f"{owner}.{name}": t for name, t in pool.named_tensors().items()})
    return tensors


def check_allocated(plan: MemoryPlan, pools: Pools) -> None:
    """Compare every tensor's planned bytes with those of its storage.

    Raises: MemoryPlanError naming the tensors that differ, are missing, or were not planned.
    """
    planned = {spec.name: spec.nbytes for spec in plan.tensors}
    allocated = {
        name: tensor.untyped_storage().nbytes()
        for name, tensor in _allocated_tensors(pools).items()
    }
    wrong = [
        f"{name}: planned {planned.get(name)} bytes, allocated {allocated.get(name)}"
        for name in {**planned, **allocated}
        if planned.get(name) != allocated.get(name)
    ]
    if wrong:
        raise MemoryPlanError("pools differ from the memory plan: " + "; ".join(wrong))


def get_schedule() -> ServerArgs:
    """Arguments about scheduling and state slots of this process."""
    return get_server_args()


def max_speculative_num_draft_tokens() -> int | None:
    """Widest verify of this process, adaptive widths included; None without speculation."""
    return max_draft_tokens(get_server_args())


_lasting_overrides: list[AbstractContextManager] = []


def _override_for_good(**values: int) -> None:
    """Replace arguments in the runtime context until an enclosing override or the process ends."""
    override = get_context().override(**values)
    if isinstance(override, AbstractContextManager):
        override.__enter__()
        _lasting_overrides.append(override)


@dataclass(kw_only=True, slots=True)
class KVCacheConfigurator:
    """State-pool sizing from flags and remaining memory, in the units others call it with.

    The server and ``sglang plan`` use ``make_plan``, which solves the same equations
    (``state_sizing``); this class keeps the names and the GiB interface of the contract.
    """

    mambaish_config: Any
    model_config: Any
    spec_algorithm: Any
    hybrid_gdn_config: Any = None
    hybrid_kda_config: Any = None
    extra_mamba_cache_bytes_per_req: int = 0
    pp_size: int = 1
    attn_dp_size: int = 1

    def _calculate_mamba_ratio(self) -> int:
        """State slots that one running request needs at its peak."""
        args = get_schedule()
        strategy = args.mamba_radix_cache_strategy
        return slots_per_request(
            radix_cache=not args.disable_radix_cache,
            extra_buffer=strategy in ("extra_buffer", "extra_buffer_lazy"),
            lazy=strategy == "extra_buffer_lazy",
            overlap=not args.disable_overlap_schedule,
            skip_decode_lock=bool(envs.SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK.get()),
        )

    def _linear_lossless_verify_enabled(self) -> bool:
        """Whether update tuples are used. Raises: ValueError with the flag on a non-GDN model."""
        if not get_exec().mamba.enable_linear_lossless_verify:
            return False
        if self.hybrid_gdn_config is None:
            raise ValueError(
                "--enable-linear-lossless-verify needs a model with Gated-DeltaNet layers; drop it"
            )
        return True

    def _spec_intermediate_bytes(self, n_slots: int, pp_layer_scale: float) -> int:
        """Bytes charged for ``n_slots`` verify rows on the fullest pipeline stage.

        Snapshots are charged a whole state per configured draft token; update tuples exactly what
        the pool allocates for its widest draft.
        """
        params = self.mambaish_config.mamba2_cache_params
        args = get_server_args()
        if not self._linear_lossless_verify_enabled():
            scaled = int(params.mamba_cache_per_req * pp_layer_scale)
            return scaled * n_slots * args.speculative_num_draft_tokens
        row = spec_intermediate_bytes_per_req(
            params,
            max_speculative_num_draft_tokens(),
            speculative_eagle_topk=args.speculative_eagle_topk,
            enable_linear_lossless_verify=True,
        )
        return int(row * pp_layer_scale) * n_slots

    def _handle_max_mamba_cache(self, total_rest_memory: float) -> float:
        """Size the state pool out of ``total_rest_memory`` GiB and return what is left, in GiB.

        The number of slots is written over ``max_mamba_cache_size`` in the runtime context.
        Raises: RuntimeError when no slot fits, with the flags to move.
        """
        schedule = get_schedule()
        params = self.mambaish_config.mamba2_cache_params
        scale = _pp_layer_scale(params.layers, self.model_config.num_hidden_layers, self.pp_size)
        extra, fixed, row = 0, 0, 0
        if not self.spec_algorithm.is_none():
            replayssm = get_exec().mamba.enable_linear_replayssm_spec
            kda = self.hybrid_kda_config is not None
            gdn = self.hybrid_gdn_config is not None
            extra = int(self.extra_mamba_cache_bytes_per_req * scale)
            is_prefill = get_disagg().disaggregation_mode == "prefill"
            if not is_prefill and replayssm and (gdn or kda):
                record_len = get_exec().mamba.linear_replayssm_cache_len
                ring = params.replayssm_ring_bytes_per_req(record_len=record_len)
                extra += int(ring * scale)
            elif not is_prefill:
                row = self._spec_intermediate_bytes(1, scale)
        costs = StateCosts(
            slot=int(params.mamba_cache_per_req * scale),
            row=row,
            ratio=self._calculate_mamba_ratio(),
            extra=extra,
            fixed=fixed,
        )
        request = StateRequest(
            max_mamba_cache_size=schedule.max_mamba_cache_size,
            max_running_requests=schedule.max_running_requests,
            radix_cache=not schedule.disable_radix_cache,
            full_memory_ratio=schedule.mamba_full_memory_ratio,
            attn_dp_size=self.attn_dp_size,
        )
        sizing = solve(costs, request, total_rest_memory * GIB)
        if sizing.slots <= 0:
            raise RuntimeError(_no_slot_fits(total_rest_memory, costs))
        _override_for_good(max_mamba_cache_size=sizing.slots)
        return total_rest_memory - sizing.charged / GIB


def _no_slot_fits(rest_gib: float, costs: StateCosts) -> str:
    one = (2 * (costs.slot + costs.extra) + 2 * costs.row) / GIB
    return (
        f"no state slot fits: one slot and its verify row need {one:.2f} GiB beside the padding, "
        f"{max(rest_gib, 0):.2f} GiB are left after weights. Raise --mem-fraction-static or "
        "--mamba-full-memory-ratio, lower --speculative-num-draft-tokens, or turn on "
        "--enable-linear-lossless-verify"
    )


def _pp_layer_scale(layers: list[int], num_layers: int, pp_size: int) -> float:
    """Largest share of the linear layers that one pipeline stage holds."""
    if pp_size == 1 or not layers:
        return 1.0
    held = [sum(layer in stage for layer in layers) for stage in layer_ranges(num_layers, pp_size)]
    return max(held) / len(layers)
