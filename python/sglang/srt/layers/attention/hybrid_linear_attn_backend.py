"""Full attention and linear attention behind one backend, and the commit of a verify.

`update_mamba_state_after_mtp_verify` is the only way a verify becomes permanent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sglang.kernels.ops.mamba.mamba_state_scatter_triton import (
    fused_conv_window_scatter_multi,
    fused_conv_window_scatter_with_mask,
    fused_mamba_state_scatter_with_mask,
    scatter_mamba_states_after_mtp_verify,
)
from sglang.kernels.ops.mamba.tuple_replay import commit_tuples, replay_tuples
from sglang.srt.environ import envs
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.linear.utils import build_verify_intermediate_state_indices
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

__all__ = [
    "HybridLinearAttnBackend",
    "LinearForwardMetadata",
    "MambaAttnBackendBase",
    "envs",
    "fused_conv_window_scatter_multi",
    "fused_conv_window_scatter_with_mask",
    "fused_mamba_state_scatter_with_mask",
    "scatter_mamba_states_after_mtp_verify",
]


def _reconstruct_ssm_from_tuples(
    ssm_states: torch.Tensor,
    u_cache: torch.Tensor,
    k_cache: torch.Tensor,
    g_cache: torch.Tensor,
    pool_indices: torch.Tensor,
    cache_indices: torch.Tensor,
    step_indices: torch.Tensor,
    dest_indices: torch.Tensor | None = None,
    use_ptx: bool | None = None,
) -> None:
    """Advance ssm_states[:, cache_indices] over steps 0..step of scratch rows pool_indices.

    ssm_states [L, S, HV, V, K]; u_cache [L, R, D, HV, V], k_cache [L, R, D, HV, K], g_cache [L, R, D, HV]
    fp32; index vectors [n]. The result goes to dest_indices, or in place when None. Rows with a step
    outside 0..D-1, or a slot, destination or scratch row out of range are skipped.
    """
    replay_tuples(
        ssm_states,
        u_cache,
        k_cache,
        g_cache,
        pool_indices,
        cache_indices,
        step_indices,
        dest_indices,
        use_ptx,
    )


class ReqToStatePool(Protocol):
    """What a linear backend reads of the request pool."""

    def get_mamba_indices(self, req_indices: torch.Tensor) -> torch.Tensor: ...

    def translate_mamba_indices(self, indices: torch.Tensor) -> torch.Tensor: ...


@dataclass
class LinearForwardMetadata:
    """What all linear layers of one call share.

    mamba_cache_indices [R] working slots, -1 skips; query_start_loc [R+1] int32;
    mamba_track_indices [R] destinations of boundary states or None.
    """

    mamba_cache_indices: torch.Tensor
    query_start_loc: torch.Tensor | None = None
    mamba_track_indices: torch.Tensor | None = None


class MambaAttnBackendBase(AttentionBackend):
    """Slots and scratch rows of the linear layers; subclasses run the kernels.

    `num_verify_rows` is the number of requests that can verify at once; it is also the discard row.
    """

    accept_lens_pool: torch.Tensor | None = None

    def __init__(
        self, req_to_token_pool: ReqToStatePool, *, device: torch.device, num_verify_rows: int
    ) -> None:
        self.req_to_token_pool = req_to_token_pool
        self.device = device
        self.num_verify_rows = num_verify_rows
        self.forward_metadata: LinearForwardMetadata | None = None
        self.verify_intermediate_state_indices = build_verify_intermediate_state_indices(
            num_verify_rows, device
        )

    def _translate_mamba_indices(self, indices: torch.Tensor) -> torch.Tensor:
        return self.req_to_token_pool.translate_mamba_indices(indices)

    def init_forward_metadata(self, fb: ForwardBatch) -> None:
        """Take the batch's slots. Raises: ValueError if the batch carries none."""
        self.forward_metadata = LinearForwardMetadata(
            mamba_cache_indices=self.slots_of(fb),
            query_start_loc=fb.query_start_loc,
            mamba_track_indices=fb.mamba_track_indices,
        )

    @staticmethod
    def slots_of(fb: ForwardBatch) -> torch.Tensor:
        """Working slots [R] of the batch. Raises: ValueError if it carries none."""
        if fb.mamba_cache_indices is None:
            raise ValueError("mamba_cache_indices is None; a model with GDN layers needs them")
        return fb.mamba_cache_indices

    def init_forward_metadata_out_graph(self, fb: ForwardBatch, in_capture: bool = False) -> None:
        """The part of `init_forward_metadata` that a captured graph does not contain: all of it."""
        self.init_forward_metadata(fb)

    def _replay_metadata(
        self,
        bs: int,
        req_pool_indices: torch.Tensor,
        forward_mode: ForwardMode,
        spec_info: object,
        seq_lens_cpu: torch.Tensor | None,
        num_padding: int = 0,
        in_capture: bool = False,
        mamba_track_indices: torch.Tensor | None = None,
    ) -> LinearForwardMetadata:
        """Metadata of `bs` rows of which the last `num_padding` are padding: slot -1, track -1.

        Depends on rows and padding alone; mode, draft metadata and lengths are there for the callers' sake.
        Raises: ValueError, with SGLANG_VALIDATE_MAMBA_REPLAY_STATE_INDICES only (it waits for the device), if
        a real row has no slot or two share one.
        """
        num_real = bs - num_padding
        slots = torch.full((bs,), -1, dtype=torch.int32, device=req_pool_indices.device)
        real = self.req_to_token_pool.get_mamba_indices(req_pool_indices[:num_real])
        slots[:num_real] = self._translate_mamba_indices(real).to(torch.int32)
        if envs.SGLANG_VALIDATE_MAMBA_REPLAY_STATE_INDICES.get():
            _check_real_slots(slots[:num_real])
        track = None
        if mamba_track_indices is not None:
            track = torch.full((bs,), -1, dtype=torch.int64, device=slots.device)
            track[:num_real] = mamba_track_indices[:num_real]
        return LinearForwardMetadata(slots, mamba_track_indices=track)


def _check_real_slots(slots: torch.Tensor) -> None:
    """Slot 0 is padding, so rows may share it. Raises: ValueError."""
    found = slots.tolist()
    owned = [slot for slot in found if slot != 0]
    if min(found, default=0) < 0 or len(set(owned)) != len(owned):
        raise ValueError(
            f"state slots of the rows to replay are {found}; each row needs a slot of its own"
        )


class HybridLinearAttnBackend(AttentionBackend):
    """Sends full-attention layers to one child and linear layers to the other."""

    def __init__(
        self,
        full_attn_backend: AttentionBackend,
        linear_attn_backend: MambaAttnBackendBase,
        full_attn_layers: list[int],
    ) -> None:
        self.full_attn_layers = full_attn_layers
        self.full_attn_backend = full_attn_backend
        self.linear_attn_backend = linear_attn_backend
        self.attn_backend_list = [full_attn_backend, linear_attn_backend]

    def init_forward_metadata(self, fb: ForwardBatch) -> None:
        self.full_attn_backend.init_forward_metadata(fb)
        if not fb.forward_mode.is_draft_extend_v2():
            self.linear_attn_backend.init_forward_metadata(fb)

    def init_forward_metadata_out_graph(self, fb: ForwardBatch, in_capture: bool = False) -> None:
        """Prepare both children for a graph replay (or its capture)."""
        for backend in (self.full_attn_backend, self.linear_attn_backend):
            backend.init_forward_metadata_out_graph(fb, in_capture=in_capture)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        fb: ForwardBatch,
    ) -> torch.Tensor:
        return self.full_attn_backend.forward(q, k, v, layer, fb)

    def kv_buffers(self, layer: RadixAttention) -> tuple[torch.Tensor, torch.Tensor] | None:
        return self.full_attn_backend.kv_buffers(layer)

    def attend(self, q: torch.Tensor, layer: RadixAttention, fb: ForwardBatch) -> torch.Tensor:
        return self.full_attn_backend.attend(q, layer, fb)

    def forward_linear(
        self,
        mixed_qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        layer: RadixLinearAttention,
        fb: ForwardBatch,
    ) -> torch.Tensor:
        return self.linear_attn_backend.forward_linear(mixed_qkv, a, b, layer, fb)

    @staticmethod
    def _scatter_speculative_state_with_mask(
        dst: torch.Tensor,
        src: torch.Tensor,
        dst_indices_raw: torch.Tensor,
        step_indices_raw: torch.Tensor,
        src_indices_raw: torch.Tensor | None = None,
    ) -> None:
        """dst[:, dst_indices[i]] = src[:, row_i, step_indices[i]] for valid rows; any device."""
        fused_conv_window_scatter_with_mask(
            dst, src, dst_indices_raw, step_indices_raw, src_indices_raw
        )

    def update_mamba_state_after_mtp_verify(
        self,
        last_correct_step_indices: torch.Tensor,
        mamba_track_indices: torch.Tensor | None,
        mamba_steps_to_track: torch.Tensor | None,
        model: object,
        req_pool_indices: torch.Tensor | None = None,
    ) -> None:
        """Make the accepted steps of the last verify permanent: boundary states first, then in place.

        last_correct_step_indices [n] accepted step of each request, -1 none; mamba_track_indices [n]
        destination of a boundary state, -1 none, or None; mamba_steps_to_track [n] its step, -1 none;
        req_pool_indices [n] request rows, used only with stable rows. Never waits for the device.
        """
        linear = self.linear_attn_backend
        pool = linear.req_to_token_pool
        n = last_correct_step_indices.shape[0]
        src_rows = None
        if req_pool_indices is not None and envs.SGLANG_ENABLE_PP_SPEC.get():
            src_rows = req_pool_indices[:n]
        if mamba_track_indices is not None:
            mamba_track_indices = linear._translate_mamba_indices(mamba_track_indices)
        if src_rows is not None:
            slots = linear._translate_mamba_indices(pool.get_mamba_indices(src_rows))
        else:
            slots = linear.forward_metadata.mamba_cache_indices[:n]

        caches = pool.get_speculative_mamba2_params_all_layers()
        has_tuples = isinstance(caches.intermediate_ssm_u, torch.Tensor)
        if has_tuples:
            rows = src_rows
            if rows is None:
                rows = linear.verify_intermediate_state_indices[:n]
            commit_tuples(
                caches.temporal,
                caches.intermediate_ssm_u,
                caches.intermediate_ssm_k,
                caches.intermediate_ssm_g,
                rows,
                slots,
                last_correct_step_indices,
                mamba_track_indices,
                mamba_steps_to_track,
            )
        scatter_mamba_states_after_mtp_verify(
            caches,
            slots,
            last_correct_step_indices,
            mamba_track_indices,
            mamba_steps_to_track,
            src_indices_raw=src_rows,
            skip_ssm=has_tuples,
        )
        self._update_ple_state_after_mtp_verify(
            slots, last_correct_step_indices, mamba_track_indices, mamba_steps_to_track, src_rows
        )

    def _update_ple_state_after_mtp_verify(
        self,
        state_indices_tensor: torch.Tensor,
        last_correct_step_indices: torch.Tensor,
        mamba_track_indices: torch.Tensor | None,
        mamba_steps_to_track: torch.Tensor | None,
        src_indices_raw: torch.Tensor | None = None,
    ) -> None:
        """Commit the side states (short convolution, n-gram context) of models that have them."""
        pool = self.linear_attn_backend.req_to_token_pool
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        short_conv = pool.short_conv_pool
        if short_conv is not None and short_conv.conv_state is not None:
            pairs.append((short_conv.conv_state, short_conv.intermediate_conv_state))
        ngram = pool.ngram_pool
        if ngram is not None and ngram.context is not None:
            pairs.append((ngram.context, ngram.intermediate_context))
        for dst, src in pairs:
            if mamba_track_indices is not None and mamba_steps_to_track is not None:
                self._scatter_speculative_state_with_mask(
                    dst, src, mamba_track_indices, mamba_steps_to_track, src_indices_raw
                )
            self._scatter_speculative_state_with_mask(
                dst, src, state_indices_tensor, last_correct_step_indices, src_indices_raw
            )
