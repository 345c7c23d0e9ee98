"""One pre-norm decoder layer of a hybrid model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sglang.kernels import triton_support
from sglang.kernels.ops.fused.sums import Delta, total_of
from sglang.kernels.ops.quantization.rows import NormedRows
from sglang.srt.configs.model_config import FULL_ATTENTION, ModelConfig
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.fp8_linear import FP8Linear, keeps_fp8
from sglang.srt.layers.gated_attention import GatedAttention
from sglang.srt.layers.gated_delta_net import GatedDeltaNet
from sglang.srt.layers.gpu_experts import GpuSparseMoE
from sglang.srt.layers.layernorm import RMSNorm, RowForm
from sglang.srt.layers.mlp import DenseMLP
from sglang.srt.layers.moe import SparseMoE
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class DecoderLayer(nn.Module):
    """``x += mixer(norm(x)); x += mlp(norm(x))``, the mixer being full attention or GDN."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        layer_id: int,
        rotary: RotaryEmbedding,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        eps = config.rms_norm_eps
        size = config.hidden_size
        self.input_layernorm = RMSNorm(size, eps, unit_offset=True, device=device)
        self.post_attention_layernorm = RMSNorm(size, eps, unit_offset=True, device=device)
        self.mixer: GatedAttention | GatedDeltaNet
        if config.layer_types[layer_id] == FULL_ATTENTION:
            self.mixer = GatedAttention(
                config,
                layer_id=layer_id,
                kv_layer=config.full_attention_layer_ids.index(layer_id),
                rotary=rotary,
                device=device,
                dtype=dtype,
            )
        else:
            self.mixer = GatedDeltaNet(
                config,
                layer_id=layer_id,
                device=device,
                dtype=dtype,
            )
        self.mlp = make_mlp(config, layer_id, device=device, dtype=dtype)
        self.mlp_reads = RowForm.PLAIN
        if isinstance(self.mlp, GpuSparseMoE):
            self.mlp_reads = self.mlp.reads
        elif isinstance(self.mlp, DenseMLP) and isinstance(self.mlp.gate_up, FP8Linear):
            self.mlp_reads = RowForm.QUANTIZED

    def forward(self, x: Tensor, fb: ForwardBatch, backend: AttentionBackend) -> Tensor:
        """[T, H] residual stream in and out."""
        x, delta = self.advance(x, None, fb, backend)
        return x + total_of(delta)

    def advance(
        self, x: Tensor, delta: Delta | None, fb: ForwardBatch, backend: AttentionBackend
    ) -> tuple[Tensor, Delta]:
        """``forward`` of x + delta as a pair of the same kind: the sum belongs to the norm that reads it."""
        normed, x = self.input_layernorm.for_reader(x, delta, self.mixer.reads)
        mixed = self.mixer(normed, fb, backend)
        normed, x = self.post_attention_layernorm.for_reader(x, mixed, self.mlp_reads)
        return x, self._feed_forward(normed)

    def _feed_forward(self, normed: NormedRows) -> Delta:
        if isinstance(self.mlp, GpuSparseMoE):
            return self.mlp(normed)
        if isinstance(self.mlp, DenseMLP):
            return self.mlp.in_parts(normed.best())
        return self.mlp(normed.as_plain())


def make_mlp(
    config: ModelConfig,
    layer_id: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> DenseMLP | SparseMoE | GpuSparseMoE:
    if not config.is_moe_layer(layer_id):
        return DenseMLP(
            config.hidden_size,
            config.intermediate_size,
            device=device,
            dtype=dtype,
            fp8=keeps_fp8(config, device),
        )
    on_gpu = triton_support.runs_on(torch.empty(0, device=device))
    return (GpuSparseMoE if on_gpu else SparseMoE)(
        hidden_size=config.hidden_size,
        num_experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        intermediate_size=config.moe_intermediate_size,
        shared_intermediate_size=config.shared_expert_intermediate_size,
        norm_topk_prob=config.norm_topk_prob,
        device=device,
        dtype=dtype,
        fp8=keeps_fp8(config, device),
    )
