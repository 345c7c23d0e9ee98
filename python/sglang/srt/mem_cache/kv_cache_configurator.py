"""State-pool sizing under the names and in the units that others call it with."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.mem_cache.pool import spec_intermediate_bytes_per_req
from sglang.srt.mem_cache.state_sizing import (
    DEFAULT_MAMBA_SHARE,
    GIB,
    StateCosts,
    StateRequest,
    slots_per_request,
    solve,
)
from sglang.srt.mem_cache.weight_sizes import layer_ranges
from sglang.srt.runtime_context import (
    get_context,
    get_disagg,
    get_exec,
    get_schedule,
    get_server_args,
    get_spec,
)


def max_speculative_num_draft_tokens() -> int | None:
    """Widest verify of this process, adaptive widths included; None without speculation."""
    return get_server_args().max_speculative_num_draft_tokens()


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

    The server and ``sglang plan`` use ``planner.make_plan``, which solves the same equations
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
        spec = get_spec()
        if not self._linear_lossless_verify_enabled():
            scaled = int(params.mamba_cache_per_req * pp_layer_scale)
            return scaled * n_slots * spec.speculative_num_draft_tokens
        row = spec_intermediate_bytes_per_req(
            params,
            max_speculative_num_draft_tokens(),
            speculative_eagle_topk=spec.speculative_eagle_topk,
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
        scale = 1.0
        if self.pp_size > 1:
            layers, total = params.layers, self.model_config.num_hidden_layers
            scale = _pp_layer_scale(layers, total, self.pp_size)
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
        given = schedule.max_mamba_cache_size
        share = schedule.mamba_full_memory_ratio
        share = DEFAULT_MAMBA_SHARE if share is None else share
        request = StateRequest(
            max_mamba_cache_size=given,
            max_running_requests=schedule.max_running_requests,
            radix_cache=given is not None or not schedule.disable_radix_cache,
            full_memory_ratio=share,
            attn_dp_size=self.attn_dp_size,
        )
        sizing = solve(costs, request, total_rest_memory * GIB)
        if sizing.slots <= 0:
            raise RuntimeError(_no_slot_fits(total_rest_memory, costs, share))
        _override_for_good(max_mamba_cache_size=sizing.slots)
        return total_rest_memory - sizing.charged / GIB


def _no_slot_fits(rest_gib: float, costs: StateCosts, share: float) -> str:
    one = (2 * (costs.slot + costs.extra) + 2 * costs.row) / GIB
    narrower = ""
    if costs.has_scratch:
        width = get_spec().speculative_num_draft_tokens
        narrower = (
            f", lower --speculative-num-draft-tokens {width}, or turn on "
            "--enable-linear-lossless-verify"
        )
    return (
        f"no state slot fits: one slot and its verify row need {one:.2f} GiB beside the padding, "
        f"{max(rest_gib, 0):.2f} GiB are left after weights. Raise --mem-fraction-static or "
        f"--mamba-full-memory-ratio {share:g}{narrower}"
    )


def _pp_layer_scale(layers: list[int], num_layers: int, pp_size: int) -> float:
    """Largest share of the linear layers that one pipeline stage holds."""
    if not layers:
        return 1.0
    held = [sum(layer in stage for layer in layers) for stage in layer_ranges(num_layers, pp_size)]
    return max(held) / len(layers)
