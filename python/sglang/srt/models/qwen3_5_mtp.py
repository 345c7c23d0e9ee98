"""The multi-token-prediction block that the checkpoints ship, as a draft model."""

from __future__ import annotations

import torch
from torch import nn

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.decoder_layer import DecoderLayer
from sglang.srt.layers.fused_step import FusedStep
from sglang.srt.layers.layernorm import RMSNorm, RowForm
from sglang.srt.layers.linear import Linear
from sglang.srt.layers.logits_processor import select_outputs
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, LogitsOutput
from sglang.srt.model_loader.weight_slots import WeightSlots, decoder_slots
from sglang.srt.models.hybrid_gdn import (
    HybridGDNForCausalLM,
    check_batch_invariance,
    max_position,
)


class Qwen3_5MTP(nn.Module):
    """``fc([norm(embed(x_{t+1})); norm(h_t)])``, one full-attention layer, norm, the target's head.

    Row t carries the target's post-final-norm hidden state of position t and the id of the token at
    t + 1; its position is t. Embedding and head belong to ``target`` and are never loaded twice.
    """

    skipped_prefixes = ("model.", "lm_head.", "visual.")

    def __init__(
        self,
        config: ModelConfig,
        *,
        target: HybridGDNForCausalLM,
        device: torch.device,
        dtype: torch.dtype,
        attn_backend: AttentionBackend,
        batch_invariant: bool = False,
    ) -> None:
        super().__init__()
        self.config = config.mtp_config()
        self.attn_backend = attn_backend
        self.embed_tokens = target.embed_tokens
        self.lm_head = target.lm_head
        size, eps = config.hidden_size, config.rms_norm_eps
        self.activation_dtype = target.activation_dtype
        self.pre_fc_norm_embedding = RMSNorm(size, eps, unit_offset=True, device=device)
        self.pre_fc_norm_hidden = RMSNorm(size, eps, unit_offset=True, device=device)
        self.fc = Linear(2 * size, size, device=device, dtype=dtype)
        self.rotary = RotaryEmbedding(config.rope, device=device)
        self.layers = nn.ModuleList(
            [
                DecoderLayer(
                    self.config,
                    layer_id=0,
                    rotary=self.rotary,
                    device=device,
                    dtype=dtype,
                )
            ]
        )
        self.norm = RMSNorm(size, eps, unit_offset=True, device=device)
        self.fused_step: FusedStep | None = None
        self.batch_invariant = batch_invariant

    def forward(self, fb: ForwardBatch) -> LogitsOutput:
        """Logits for the token after ``fb.input_ids``; hidden is what the next draft step takes.

        Raises:
            ValueError: ``fb.spec_hidden`` is missing.
        """
        if fb.spec_hidden is None:
            raise ValueError("ForwardBatch.spec_hidden is None; an MTP model needs the hidden rows")
        self.rotary.reserve(max_position(fb) + 1)
        if self.fused_step is not None:
            return self.fused_step.run(fb)
        embedded = self.pre_fc_norm_embedding(self.embed_tokens(fb.input_ids))
        hidden = self.pre_fc_norm_hidden(fb.spec_hidden.to(self.activation_dtype))
        x = self.fc(torch.cat([embedded, hidden], dim=-1))
        x, delta = self.layers[0].advance(x, None, fb, self.attn_backend)
        normed, _ = self.norm.for_reader(x, delta, RowForm.PLAIN)
        return select_outputs(fb, normed.as_plain(), self.lm_head, None)

    def weight_slots(self) -> WeightSlots:
        """Where each ``mtp.`` tensor goes."""
        slots = decoder_slots(self.layers, prefix="mtp.layers.", config=self.config)
        slots.add("mtp.fc.weight", self.fc.weight)
        slots.add("mtp.norm.weight", self.norm.weight)
        slots.add("mtp.pre_fc_norm_embedding.weight", self.pre_fc_norm_embedding.weight)
        slots.add("mtp.pre_fc_norm_hidden.weight", self.pre_fc_norm_hidden.weight)
        return slots

    def finish_loading(self) -> None:
        """Called once by the loader, after the target's."""
        self.fused_step = FusedStep.create(self, draft=self)
        on_cpu = self.norm.weight.device.type == "cpu"
        check_batch_invariance(self.batch_invariant and on_cpu, self.fused_step)
