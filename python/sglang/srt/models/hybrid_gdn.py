"""The decoder that all hybrid Gated-DeltaNet architectures share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sglang.kernels.ops.fused.sums import Delta, total_of
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.decoder_layer import DecoderLayer
from sglang.srt.layers.fused_step import FusedStep
from sglang.srt.layers.layernorm import RMSNorm, RowForm
from sglang.srt.layers.linear import Linear
from sglang.srt.layers.logits_processor import VocabEmbedding, select_outputs
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, LogitsOutput
from sglang.srt.model_loader.weight_slots import WeightSlots, decoder_slots


class HybridGDNForCausalLM(nn.Module):
    """Embedding, decoder layers of both kinds, final norm, head.

    ``fused_step`` runs whole calls where the platform has a compiled step; the module path beside
    it computes the same and is what runs everywhere else.
    """

    skipped_prefixes = ("model.visual.", "visual.", "mtp.")

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        attn_backend: AttentionBackend,
        batch_invariant: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.attn_backend = attn_backend
        self.lm_head = Linear(
            config.hidden_size,
            config.vocab_size,
            device=device,
            dtype=dtype,
        )
        table = self.lm_head
        if not config.tie_word_embeddings:
            table = Linear(config.hidden_size, config.vocab_size, device=device, dtype=dtype)
        self.activation_dtype = torch.float32 if device.type == "cpu" else dtype
        self.embed_tokens = VocabEmbedding(table, activation_dtype=self.activation_dtype)
        self.rotary = RotaryEmbedding(config.rope, device=device)
        self.layers = nn.ModuleList(
            DecoderLayer(
                config,
                layer_id=i,
                rotary=self.rotary,
                device=device,
                dtype=dtype,
            )
            for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(
            config.hidden_size, config.rms_norm_eps, unit_offset=True, device=device
        )
        self.fused_step: FusedStep | None = None
        self.batch_invariant = batch_invariant

    def forward(self, fb: ForwardBatch) -> LogitsOutput:
        """Run one call; see ForwardBatch and LogitsOutput."""
        self.rotary.reserve(max_position(fb) + 1)
        if self.fused_step is not None:
            return self.fused_step.run(fb)
        x, taps = self.embed_tokens(fb.input_ids), []
        delta: Delta | None = None
        for i, layer in enumerate(self.layers):
            x, delta = layer.advance(x, delta, fb, self.attn_backend)
            if i in fb.capture_layer_ids:
                taps.append(x + total_of(delta))
        joined = torch.cat(taps, dim=-1) if taps else None
        normed, _ = self.norm.for_reader(x, delta, RowForm.PLAIN)
        return select_outputs(fb, normed.as_plain(), self.lm_head, joined)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Head alone, for drafters: [n, H] post-final-norm -> [n, vocab] fp32."""
        return self.lm_head(hidden.to(self.activation_dtype)).float()

    def weight_slots(self) -> WeightSlots:
        """Where each checkpoint tensor of the text model goes, by normalised name."""
        slots = decoder_slots(self.layers, prefix="model.layers.", config=self.config)
        slots.add("model.norm.weight", self.norm.weight)
        slots.add("model.embed_tokens.weight", self.embed_tokens.table.weight)
        if self.config.tie_word_embeddings:
            slots.ignore("lm_head.weight")
        else:
            slots.add("lm_head.weight", self.lm_head.weight)
        return slots

    def finish_loading(self) -> None:
        """Called once by the loader: hand the weights to the compiled step, if there is one.

        Raises:
            ValueError: rows must not depend on their batch, and only the compiled step promises it.
        """
        self.fused_step = FusedStep.create(self)
        on_cpu = self.norm.weight.device.type == "cpu"
        check_batch_invariance(self.batch_invariant and on_cpu, self.fused_step)


def check_batch_invariance(wanted: bool, fused_step: FusedStep | None) -> None:
    if wanted and fused_step is None:
        raise ValueError(
            "--enable-deterministic-inference needs the compiled CPU kernels: install a C++ "
            "compiler, unset SGLANG_CPU_KERNELS=torch, or drop the flag"
        )


def max_position(fb: ForwardBatch) -> int:
    """Largest position of the call, from its host-side lengths."""
    lens = zip(fb.prefix_lens_cpu, fb.query_lens_cpu)
    return max((prefix + length for prefix, length in lens), default=1) - 1
