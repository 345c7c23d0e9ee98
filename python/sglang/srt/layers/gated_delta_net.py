"""The Gated-DeltaNet mixer: projections, recurrence through a backend, gated norm."""

from __future__ import annotations

import torch
from torch import nn

from sglang.kernels.ops.fused.sums import Delta
from sglang.kernels.ops.quantization.rows import NormedRows
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.fp8_linear import FP8Linear, PartlyFP8Linear, keeps_fp8, make_linear
from sglang.srt.layers.layernorm import GatedRMSNorm, RowForm
from sglang.srt.layers.linear import Linear
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class GatedDeltaNet(nn.Module):
    """``in_proj`` rows: q | k | v (conv_dim), z (value_dim), b (HV), a (HV), each head by head."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        layer_id: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.attn = RadixLinearAttention(
            layer_id=layer_id,
            num_k_heads=config.linear_num_key_heads,
            num_v_heads=config.linear_num_value_heads,
            head_k_dim=config.linear_key_head_dim,
            head_v_dim=config.linear_value_head_dim,
            conv_kernel_size=config.linear_conv_kernel_dim,
            device=device,
            dtype=torch.float32 if device.type == "cpu" else dtype,
        )
        heads = config.linear_num_value_heads
        self.in_rows = (config.conv_dim, config.value_dim, heads, heads)
        size, fp8 = config.hidden_size, keeps_fp8(config, device)
        self.reads = RowForm.PLAIN | RowForm.QUANTIZED if fp8 else RowForm.PLAIN
        self.in_proj: Linear | PartlyFP8Linear
        if fp8:
            self.in_proj = PartlyFP8Linear(
                size,
                quantized_rows=sum(self.in_rows[:2]),
                plain_rows=sum(self.in_rows[2:]),
                device=device,
                dtype=dtype,
            )
        else:
            self.in_proj = Linear(size, sum(self.in_rows), device=device, dtype=dtype)
        self.norm = GatedRMSNorm(
            config.linear_value_head_dim,
            config.rms_norm_eps,
            activation=config.output_gate_type,
            device=device,
        )
        self.out_proj = make_linear(
            config.value_dim,
            size,
            device=device,
            dtype=dtype,
            fp8=fp8,
        )

    def forward(self, x: NormedRows, fb: ForwardBatch, backend: AttentionBackend) -> Delta:
        """[T, H] -> [T, H]; advances or records the recurrent state as ``fb`` asks."""
        if isinstance(self.in_proj, PartlyFP8Linear):
            parts = self.in_proj.forward_parts(x, self.in_rows)
        else:
            parts = self.in_proj.forward_parts(x.as_plain(), self.in_rows)
        mixed_qkv, z, b, a = parts
        z = z.view(z.shape[0], self.attn.num_v_heads, self.attn.head_v_dim)
        out = backend.forward_linear(mixed_qkv, a, b, self.attn, fb)
        if isinstance(self.out_proj, FP8Linear):
            return self.out_proj.in_parts(self.norm.quantized(out, z))
        return self.out_proj(self.norm(out, z).reshape(z.shape[0], -1))
