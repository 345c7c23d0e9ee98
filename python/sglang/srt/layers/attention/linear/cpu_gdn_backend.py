"""Gated-DeltaNet layers on the CPU, over the recurrent-state pool.

Verify only records: states in the pool change in DECODE and EXTEND alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sglang.kernels.ops.cpu import gdn, gdn_torch
from sglang.kernels.ops.cpu.structs import GdnShapeArgs, GdnStateArgs
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.linear.gdn_tree import TreeScratch, record_trees
from sglang.srt.layers.attention.linear.utils import select_verify_intermediate_state_indices
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class LayerState(Protocol):
    """One layer's view of the state pool (and of the verify scratch, where there is one).

    conv[0] [S, conv_dim, W-1], temporal [S, HV, V, K];
    intermediate_conv_window[0] [R, D, conv_dim, W-1]; intermediate_ssm [R, D, HV, V, K] or None;
    intermediate_ssm_u/_k/_g [R, D, HV, V], [R, D, HV, K], [R, D, HV] fp32 or None
    """

    conv: list[Tensor]
    temporal: Tensor


class VerifyLayerState(LayerState, Protocol):
    intermediate_conv_window: list[Tensor]
    intermediate_ssm: Tensor | None
    intermediate_ssm_u: Tensor | None
    intermediate_ssm_k: Tensor | None
    intermediate_ssm_g: Tensor | None


class StateTensors(Protocol):
    spec_state_size: int
    speculative_num_draft_tokens: int | None


class StatePool(Protocol):
    req_to_token: Tensor
    mamba_pool: StateTensors

    def mamba2_layer_cache(self, layer_id: int) -> VerifyLayerState: ...

    def translate_mamba_indices(self, indices: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class GDNForwardMetadata:
    """Of the current call: working slots [R] int32, and scratch rows [R] int32 a verify writes."""

    mamba_cache_indices: Tensor
    scratch_rows: Tensor


class CpuGDNBackend(AttentionBackend):
    """Runs the compiled kernels, or their PyTorch twin, over the state pool."""

    accept_lens_pool = None

    def __init__(self, req_to_token_pool: StatePool) -> None:
        self.req_to_token_pool = req_to_token_pool
        num_rows = req_to_token_pool.req_to_token.shape[0]
        self.verify_intermediate_state_indices = torch.arange(num_rows, dtype=torch.int32)
        self.forward_metadata: GDNForwardMetadata | None = None

    def _translate_mamba_indices(self, indices: Tensor) -> Tensor:
        return self.req_to_token_pool.translate_mamba_indices(indices)

    def init_forward_metadata(self, fb: ForwardBatch) -> None:
        """Keep the slots that a commit after this call will read.

        Raises:
            ValueError: the batch carries no state slots.
        """
        if fb.mamba_cache_indices is None:
            raise ValueError("ForwardBatch.mamba_cache_indices is None for a model with GDN layers")
        rows = select_verify_intermediate_state_indices(
            self.verify_intermediate_state_indices[: fb.batch_size],
            fb.req_pool_indices,
            fb.mamba_cache_indices >= 0,
            self.req_to_token_pool.mamba_pool.spec_state_size,
        )
        self.forward_metadata = GDNForwardMetadata(fb.mamba_cache_indices, rows)

    def current(self) -> GDNForwardMetadata:
        """Metadata of the call in progress.

        Raises:
            RuntimeError: ``init_forward_metadata`` has not run.
        """
        if self.forward_metadata is None:
            raise RuntimeError("init_forward_metadata was not called for this batch")
        return self.forward_metadata

    def forward_linear(
        self,
        mixed_qkv: Tensor,
        a: Tensor,
        b: Tensor,
        layer: RadixLinearAttention,
        fb: ForwardBatch,
    ) -> Tensor:
        if fb.tree_parents is not None:
            return record_trees(
                mixed_qkv,
                a,
                b,
                layer,
                TreeScratch.of_layer(self.req_to_token_pool.mamba2_layer_cache(layer.layer_id)),
                slots=self.current().mamba_cache_indices,
                scratch_rows=self.current().scratch_rows,
                levels=fb.tree_levels,
            )
        if gdn.covers(layer.head_k_dim):
            return gdn.forward(mixed_qkv, a, b, self._native_call(layer, fb))
        cache = self.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
        return self._forward_torch(mixed_qkv, a, b, layer, cache, fb)

    def require_snapshots(self) -> None:
        """Raises: ValueError if the pool records update tuples, from which no tree can continue."""
        if self.req_to_token_pool.mamba_pool.mamba_cache.intermediate_ssm is None:
            raise ValueError(
                "a tree verify needs state snapshots; drop --enable-linear-lossless-verify"
            )

    def native_state(self, layer_id: int) -> GdnStateArgs:
        """Where one layer's states and verify scratch lie, for the compiled kernels."""
        cache = self.req_to_token_pool.mamba2_layer_cache(layer_id)
        scratch = None
        if self.req_to_token_pool.mamba_pool.speculative_num_draft_tokens is not None:
            scratch = gdn.VerifyScratch(
                window=cache.intermediate_conv_window[0],
                snapshot=cache.intermediate_ssm,
                u=cache.intermediate_ssm_u,
                k=cache.intermediate_ssm_k,
                g=cache.intermediate_ssm_g,
            )
        return gdn.state_args(cache.conv[0], cache.temporal, scratch)

    def _native_call(self, layer: RadixLinearAttention, fb: ForwardBatch) -> gdn.GdnCall:
        metadata = self.current()
        verify = fb.forward_mode.is_target_verify()
        return gdn.GdnCall(
            shape=GdnShapeArgs(
                HK=layer.num_k_heads,
                HV=layer.num_v_heads,
                K=layer.head_k_dim,
                V=layer.head_v_dim,
                W=layer.conv_weights.shape[1],
            ),
            state=self.native_state(layer.layer_id),
            conv_weights=layer.conv_weights.t().float().contiguous(),
            A_log=layer.A_log,
            dt_bias=layer.dt_bias,
            mode=gdn.MODE_VERIFY if verify else gdn.MODE_ADVANCE,
            starts=fb.query_start_loc,
            slots=metadata.mamba_cache_indices,
            scratch_rows=metadata.scratch_rows,
            track_slots=fb.mamba_track_indices,
            track_rows=fb.mamba_track_rows,
        )

    def _forward_torch(
        self,
        mixed_qkv: Tensor,
        a: Tensor,
        b: Tensor,
        layer: RadixLinearAttention,
        cache: VerifyLayerState,
        fb: ForwardBatch,
    ) -> Tensor:
        out = mixed_qkv.new_zeros((fb.num_rows, layer.num_v_heads, layer.head_v_dim))
        g, beta = gdn_torch.gates(a, b, layer.A_log, layer.dt_bias)
        slots = self.current().mamba_cache_indices.tolist()
        start = 0
        for request, (slot, length) in enumerate(zip(slots, fb.query_lens_cpu)):
            rows = slice(start, start + length)
            start += length
            if slot < 0:
                continue
            window = cache.conv[0][slot]
            x = mixed_qkv[rows].to(window.dtype).float()
            conv_out, inputs = gdn_torch.conv_rows(x, window, layer.conv_weights)
            q, k, v = gdn_torch.split_heads(
                conv_out,
                num_k_heads=layer.num_k_heads,
                head_k_dim=layer.head_k_dim,
                num_v_heads=layer.num_v_heads,
                head_v_dim=layer.head_v_dim,
            )
            parts = gdn_torch.GDNInputs(q, k, v, g[rows], beta[rows])
            if fb.forward_mode.is_target_verify():
                out[rows] = self._record(request, slot, parts, inputs, cache)
            else:
                out[rows] = self._advance(request, slot, parts, inputs, cache, fb)
        return out

    def _record(
        self,
        request: int,
        slot: int,
        parts: gdn_torch.GDNInputs,
        inputs: Tensor,
        cache: VerifyLayerState,
    ) -> Tensor:
        """Verify: leave the slot alone, write what any accepted length needs into the scratch."""
        row = int(self.current().scratch_rows[request])
        state = cache.temporal[slot].float()
        width = cache.conv[0].shape[-1]
        windows = cache.intermediate_conv_window[0][row]
        outputs = []
        for t in range(parts.q.shape[0]):
            state, u, out = gdn_torch.step(state, parts, t)
            outputs.append(out)
            windows[t] = inputs[:, t + 1 : t + 1 + width].to(windows.dtype)
            if cache.intermediate_ssm is not None:
                cache.intermediate_ssm[row, t] = state.to(cache.intermediate_ssm.dtype)
            recorded = (
                (cache.intermediate_ssm_u, u),
                (cache.intermediate_ssm_k, parts.k[t]),
                (cache.intermediate_ssm_g, parts.g[t]),
            )
            for tensor, value in recorded:
                if tensor is not None:
                    tensor[row, t] = value
        return torch.stack(outputs)

    def _advance(
        self,
        request: int,
        slot: int,
        parts: gdn_torch.GDNInputs,
        inputs: Tensor,
        cache: LayerState,
        fb: ForwardBatch,
    ) -> Tensor:
        """DECODE and EXTEND: move the slot on, storing the boundary state on the way."""
        num_rows = parts.q.shape[0]
        dest, boundary = _track(fb, request)
        cuts = [boundary, num_rows] if dest >= 0 and 0 < boundary < num_rows else [num_rows]
        state, start, outputs = cache.temporal[slot].float(), 0, []
        for end in cuts:
            state, out = _scan(state, parts.rows(start, end))
            outputs.append(out)
            start = end
            if dest >= 0 and end == boundary:
                _store(cache, dest, state, inputs, end)
        _store(cache, slot, state, inputs, num_rows)
        return torch.cat(outputs)


def _scan(state: Tensor, parts: gdn_torch.GDNInputs) -> tuple[Tensor, Tensor]:
    if parts.q.shape[0] > 1:
        return gdn_torch.chunked(state, parts)
    state, _, out = gdn_torch.step(state, parts, 0)
    return state, out[None]


def _track(fb: ForwardBatch, request: int) -> tuple[int, int]:
    """(destination slot or -1, row count) of the boundary state of ``request``."""
    if fb.mamba_track_indices is None or fb.mamba_track_rows is None:
        return -1, -1
    return int(fb.mamba_track_indices[request]), int(fb.mamba_track_rows[request])


def _store(cache: LayerState, slot: int, state: Tensor, inputs: Tensor, num_rows: int) -> None:
    """Write state and conv window as they are after ``num_rows`` tokens of the call."""
    conv = cache.conv[0]
    cache.temporal[slot] = state.to(cache.temporal.dtype)
    conv[slot] = inputs[:, num_rows : num_rows + conv.shape[-1]].to(conv.dtype)
