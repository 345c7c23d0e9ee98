"""Gated-DeltaNet layers on an accelerator, over the recurrent-state pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sglang.kernels.ops.attention.fla.prefill_plan import PrefillPlan, plan_prefill
from sglang.kernels.ops.gdn_cuda.module import unavailable_reason
from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_fn, causal_conv1d_update
from sglang.kernels.ops.mamba.mamba_state_scatter_triton import track_mamba_states_if_needed
from sglang.srt.layers.attention.hybrid_linear_attn_backend import (
    LinearForwardMetadata,
    MambaAttnBackendBase,
    ReqToStatePool,
)
from sglang.srt.layers.attention.linear.gdn_tree import TreeScratch, record_trees
from sglang.srt.layers.attention.linear.kernels.gdn_cuda_cpp import CudaCppGDNKernel
from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel
from sglang.srt.layers.attention.linear.utils import (
    LinearAttnBackends,
    LinearAttnKernelBackend,
    pp_spec_stable_rows_enabled,
    select_verify_intermediate_state_indices,
)
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

LOSSLESS_FLAG = "--enable-linear-lossless-verify"


def fused_qkv_split_gdn_prefill(
    mixed_qkv: torch.Tensor, layer: RadixLinearAttention
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views q, k [T, H, K] and v [T, HV, V] of packed rows; chunked prefill reads them as they lie."""
    return _split_views(mixed_qkv, layer)


def _split_views(
    mixed_qkv: torch.Tensor, layer: RadixLinearAttention
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = mixed_qkv.split((layer.key_dim, layer.key_dim, layer.value_dim), dim=-1)
    return (
        q.unflatten(-1, (layer.num_k_heads, layer.head_k_dim)),
        k.unflatten(-1, (layer.num_k_heads, layer.head_k_dim)),
        v.unflatten(-1, (layer.num_v_heads, layer.head_v_dim)),
    )


def _build_kernel(backend: LinearAttnKernelBackend, phase: str) -> TritonGDNKernel:
    if backend.is_triton():
        return TritonGDNKernel() if unavailable_reason() is not None else CudaCppGDNKernel()
    if backend.is_cuda_cpp():
        if (reason := unavailable_reason()) is not None:
            raise ValueError(f"--linear-attn-{phase}-backend cuda_cpp: {reason}; use triton")
        return CudaCppGDNKernel()
    raise ValueError(
        f"--linear-attn-{phase}-backend {backend.value} has no GDN kernel here; use triton"
    )


class GDNKernelDispatcher:
    """One kernel for each phase, chosen at construction.

    `triton` names our own kernels: where the device allows it, decode and chain verify run in CUDA C++ and the
    Triton kernels serve what that does not cover; trees always run in Triton.
    """

    def __init__(
        self,
        decode_backend: LinearAttnKernelBackend,
        prefill_backend: LinearAttnKernelBackend,
        verify_backend: LinearAttnKernelBackend | None = None,
    ) -> None:
        self.decode_kernel = _build_kernel(decode_backend, "decode")
        self.extend_kernel = _build_kernel(prefill_backend, "prefill")
        self.verify_kernel = _build_kernel(
            verify_backend or LinearAttnKernelBackend.TRITON, "verify"
        )
        self.tree_verify_kernel = TritonGDNKernel()
        self.verify_kernel_is_flashinfer = False

    @property
    def target_verify_supports_strided_qkv(self) -> bool:
        return self.verify_kernel.supports_strided_target_verify_qkv


class LayerState(Protocol):
    """One layer of the pool; see `MambaPool.SpeculativeState`."""

    conv: list[torch.Tensor]
    temporal: torch.Tensor
    intermediate_ssm: torch.Tensor | None
    intermediate_conv_window: list[torch.Tensor]
    intermediate_ssm_u: torch.Tensor | None
    intermediate_ssm_k: torch.Tensor | None
    intermediate_ssm_g: torch.Tensor | None


class StatePool(ReqToStatePool, Protocol):
    def mamba2_layer_cache(self, layer_id: int) -> LayerState: ...


@dataclass
class GDNForwardMetadata(LinearForwardMetadata):
    """Also: scratch_rows [R] int32 of a verify; track_mask [R] of a decode; chunks of a prefill."""

    scratch_rows: torch.Tensor | None = None
    track_mask: torch.Tensor | None = None
    prefill: PrefillPlan | None = None


class GDNAttnBackend(MambaAttnBackendBase):
    """Convolution and recurrence of GDN layers. A verify only records; decode and prefill advance slots."""

    def __init__(
        self,
        req_to_token_pool: StatePool,
        *,
        device: torch.device,
        num_verify_rows: int,
        backends: LinearAttnBackends,
    ) -> None:
        super().__init__(req_to_token_pool, device=device, num_verify_rows=num_verify_rows)
        self.kernel_dispatcher = GDNKernelDispatcher(
            backends.decode, backends.prefill, backends.verify
        )
        self.req_to_token_pool: StatePool = req_to_token_pool
        self._tuple_kernel_checked = False

    def init_forward_metadata(self, fb: ForwardBatch) -> None:
        """Slots, scratch rows and boundary states of the call."""
        slots = self.slots_of(fb)
        metadata = GDNForwardMetadata(slots, fb.query_start_loc, fb.mamba_track_indices)
        if fb.forward_mode.is_target_verify():
            valid = slots >= 0
            rows = select_verify_intermediate_state_indices(
                self.verify_intermediate_state_indices[: fb.batch_size],
                fb.req_pool_indices,
                valid,
                self.num_verify_rows,
            )
            metadata.scratch_rows = torch.where(valid, rows, -1)  # nobody records nothing
        elif fb.forward_mode.is_decode():
            if fb.mamba_track_indices is not None and fb.mamba_track_rows is not None:
                metadata.track_mask = fb.mamba_track_rows > 0
        else:
            rows = None if fb.mamba_track_indices is None else fb.mamba_track_rows_cpu
            metadata.prefill = plan_prefill(fb.query_lens_cpu, rows, slots.device)
        self.forward_metadata = metadata

    @property
    def _call(self) -> GDNForwardMetadata:
        """The metadata of the call in progress. Raises: RuntimeError before `init_forward_metadata`."""
        if not isinstance(self.forward_metadata, GDNForwardMetadata):
            raise RuntimeError("init_forward_metadata was not called for this batch")
        return self.forward_metadata

    def forward_linear(
        self,
        mixed_qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        layer: RadixLinearAttention,
        fb: ForwardBatch,
    ) -> torch.Tensor:
        """[T, conv_dim], [T, HV], [T, HV] -> [T, HV, V]."""
        cache = self.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
        if fb.tree_parents is not None:
            return record_trees(
                mixed_qkv,
                a,
                b,
                layer,
                TreeScratch.of_layer(cache),
                slots=self._call.mamba_cache_indices,
                scratch_rows=self._call.scratch_rows,
                levels=fb.tree_levels,
            )
        if fb.forward_mode.is_target_verify():
            return self._verify(mixed_qkv, a, b, layer, cache, fb)
        if fb.forward_mode.is_decode():
            return self._decode(mixed_qkv, a, b, layer, cache, fb)
        return self._extend(mixed_qkv, a, b, layer, cache, fb)

    def _decode(
        self,
        mixed_qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        layer: RadixLinearAttention,
        cache: LayerState,
        fb: ForwardBatch,
    ) -> torch.Tensor:
        metadata = self._call
        slots = metadata.mamba_cache_indices
        convolved = causal_conv1d_update(
            mixed_qkv,
            cache.conv[0],
            layer.conv_weights,
            layer.bias,
            layer.activation,
            conv_state_indices=slots,
        )
        out = self.kernel_dispatcher.decode_kernel.decode(
            layer.A_log,
            layer.dt_bias,
            convolved,
            a,
            b,
            num_v_heads=layer.num_v_heads,
            head_v_dim=layer.head_v_dim,
            ssm_states=cache.temporal,
            cache_indices=slots,
        )
        if metadata.track_mask is not None:
            track_mamba_states_if_needed(
                cache.conv[0],
                cache.temporal,
                slots,
                metadata.track_mask,
                metadata.mamba_track_indices,
                fb.batch_size,
                check_freed_slots=True,
            )
        return out

    def _extend(
        self,
        mixed_qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        layer: RadixLinearAttention,
        cache: LayerState,
        fb: ForwardBatch,
    ) -> torch.Tensor:
        metadata = self._call
        plan = metadata.prefill
        assert plan is not None, "a prefill without the plan of init_forward_metadata"
        dests = metadata.mamba_track_indices if any(plan.cuts) else None
        convolved = causal_conv1d_fn(
            mixed_qkv.t(),
            layer.conv_weights,
            layer.bias,
            cache.conv[0],
            fb.query_start_loc,
            fb.query_lens_cpu,
            cache_indices=metadata.mamba_cache_indices,
            activation=layer.activation,
            track_dests=dests,
            track_rows=None if dests is None else fb.mamba_track_rows,
        ).t()
        q, k, v = fused_qkv_split_gdn_prefill(convolved, layer)
        return self.kernel_dispatcher.extend_kernel.extend(
            layer.A_log,
            layer.dt_bias,
            q,
            k,
            v,
            a,
            b,
            ssm_states=cache.temporal,
            cache_indices=metadata.mamba_cache_indices,
            plan=plan,
            track_dests=dests,
        )

    def _verify(
        self,
        mixed_qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        layer: RadixLinearAttention,
        cache: LayerState,
        fb: ForwardBatch,
    ) -> torch.Tensor:
        metadata = self._call
        num_requests, width = fb.batch_size, fb.draft_token_num
        blocks = mixed_qkv.view(num_requests, width, -1).transpose(1, 2)
        convolved = causal_conv1d_update(
            blocks,
            cache.conv[0],
            layer.conv_weights,
            layer.bias,
            layer.activation,
            conv_state_indices=metadata.mamba_cache_indices,
            intermediate_conv_window=cache.intermediate_conv_window[0],
            intermediate_state_indices=metadata.scratch_rows,
        )
        q, k, v = _split_views(convolved.transpose(1, 2).reshape(num_requests * width, -1), layer)
        record: dict[str, torch.Tensor | None] = {}
        if isinstance(cache.intermediate_ssm_u, torch.Tensor):
            self._require_tuple_kernel()
            record = {
                "u_states_buffer": cache.intermediate_ssm_u,
                "k_states_buffer": cache.intermediate_ssm_k,
                "g_states_buffer": cache.intermediate_ssm_g,
            }
        else:
            assert cache.intermediate_ssm is not None, (
                "the pool records neither tuples nor snapshots"
            )
        return self.kernel_dispatcher.verify_kernel.target_verify(
            layer.A_log,
            layer.dt_bias,
            q[None],
            k[None],
            v[None],
            a,
            b,
            ssm_states=cache.temporal,
            cache_indices=metadata.mamba_cache_indices,
            query_start_loc=metadata.query_start_loc,
            intermediate_states_buffer=None if record else cache.intermediate_ssm,
            intermediate_state_indices=metadata.scratch_rows,
            cache_steps=width,
            retrieve_parent_token=None,
            stable_rows=pp_spec_stable_rows_enabled(),
            **record,
        )[0]

    def _require_tuple_kernel(self) -> None:
        """Raises: RuntimeError if the verify kernel would ignore the tuple ring. Checked once."""
        if self._tuple_kernel_checked:
            return
        kernel = self.kernel_dispatcher.verify_kernel
        if not isinstance(kernel, TritonGDNKernel):
            raise RuntimeError(
                f"{LOSSLESS_FLAG} needs a verify kernel that records update tuples, found "
                f"{type(kernel).__name__}; pass --linear-attn-verify-backend triton"
            )
        self._tuple_kernel_checked = True
