"""Full attention whose output is gated per head and dim."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sglang.kernels import triton_support
from sglang.kernels.ops.attention.paged.store import NormRope, norm_rope_store
from sglang.kernels.ops.fused.rows import sigmoid_mul, sigmoid_mul_quantized
from sglang.kernels.ops.fused.sums import Delta
from sglang.kernels.ops.quantization.rows import NormedRows
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.fp8_linear import FP8Linear, keeps_fp8, make_linear
from sglang.srt.layers.layernorm import RMSNorm, RowForm
from sglang.srt.layers.qk_norm_rope import norm_and_rotate
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class GatedAttention(nn.Module):
    """``qkv_proj`` rows: per query head d query then d gate rows, then all keys, then all values.

    Without ``attn_output_gate`` the gate rows do not exist.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        layer_id: int,
        kv_layer: int,
        rotary: RotaryEmbedding,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.has_gate = config.attn_output_gate
        head_dim = config.head_dim
        fp8 = keeps_fp8(config, device)
        self.reads = RowForm.QUANTIZED if fp8 else RowForm.PLAIN
        self.attn = RadixAttention(
            layer_id=layer_id,
            kv_layer=kv_layer,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            scaling=head_dim**-0.5,
        )
        self.q_rows = config.num_attention_heads * head_dim * (2 if self.has_gate else 1)
        self.kv_rows = config.num_key_value_heads * head_dim
        self.qkv_proj = make_linear(
            config.hidden_size,
            self.q_rows + 2 * self.kv_rows,
            device=device,
            dtype=dtype,
            bias=config.attention_bias,
            fp8=fp8,
        )
        self.o_proj = make_linear(
            config.num_attention_heads * head_dim,
            config.hidden_size,
            device=device,
            dtype=dtype,
            bias=config.attention_bias,
            fp8=fp8,
        )
        eps = config.rms_norm_eps
        self.q_norm = RMSNorm(head_dim, eps, unit_offset=True, device=device)
        self.k_norm = RMSNorm(head_dim, eps, unit_offset=True, device=device)
        self.rotary = rotary

    def forward(self, x: NormedRows, fb: ForwardBatch, backend: AttentionBackend) -> Delta:
        """[T, H] -> [T, H]; writes this call's keys and values."""
        attn, projected = self.attn, self.qkv_proj(x.best())
        num_rows = projected.shape[0]
        q, k, v = projected.split((self.q_rows, self.kv_rows, self.kv_rows), dim=-1)
        gate = None
        q = q.view(num_rows, attn.num_heads, -1)
        if self.has_gate:
            q, gate = q.chunk(2, dim=-1)
        k = k.view(num_rows, attn.num_kv_heads, attn.head_dim)
        v = v.view(num_rows, attn.num_kv_heads, attn.head_dim)
        out = self._attend(q, k, v, fb, backend)
        if gate is not None and isinstance(self.o_proj, FP8Linear):
            return self.o_proj.in_parts(sigmoid_mul_quantized(out, gate))
        if gate is not None:
            gated = triton_support.runs_on(out)
            out = sigmoid_mul(out, gate) if gated else out * torch.sigmoid(gate)
        return self.o_proj(out.reshape(num_rows, -1))

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, fb: ForwardBatch, backend: AttentionBackend
    ) -> Tensor:
        """Norm, rotation, storing and attention; the first three in one launch where the backend lets us store."""
        buffers = backend.kv_buffers(self.attn) if triton_support.runs_on(q) else None
        if buffers is None:
            q = norm_and_rotate(q, self.q_norm, self.rotary, fb.positions)
            k = norm_and_rotate(k, self.k_norm, self.rotary, fb.positions)
            return backend.forward(q, k, v, self.attn, fb)
        norm = NormRope(
            self.q_norm.weight,
            self.k_norm.weight,
            self.rotary.cos,
            self.rotary.sin,
            self.q_norm.eps,
            self.q_norm.unit_offset,
        )
        keys, values = buffers
        q = norm_rope_store(
            q,
            k,
            v,
            norm,
            positions=fb.positions,
            slots=fb.out_cache_loc,
            k_buffer=keys,
            v_buffer=values,
        )
        return backend.attend(q, self.attn, fb)
