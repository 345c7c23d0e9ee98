"""DSPARK: the DFLASH backbone with a Markov head that makes each draft depend on the one before."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sglang.srt.configs.draft_config import DraftConfig
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.linear import Linear
from sglang.srt.model_loader.weight_slots import WeightSlots
from sglang.srt.models.dflash import DFlashDraftModel
from sglang.srt.models.hybrid_gdn import HybridGDNForCausalLM


class MarkovHead(nn.Module):
    """A low-rank bias on the draft logits, given the previous token.

    markov_w1  [vocab, r], one row per previous token; markov_w2  r -> vocab
    ``vanilla`` uses the row itself, ``gated`` scales it by a gate of hidden state and row, ``rnn``
    replaces it by the output of a small recurrence along the block.
    """

    def __init__(self, config: DraftConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        rank, size = config.markov_rank, config.hidden_size
        self.kind = config.markov_head_type
        self.rank = rank
        self.markov_w1 = nn.Parameter(
            torch.zeros((config.vocab_size, rank), device=device, dtype=dtype), requires_grad=False
        )
        self.markov_w2 = Linear(rank, config.vocab_size, device=device, dtype=dtype)
        self.gate_proj: Linear | None = None
        self.joint_proj: Linear | None = None
        if self.kind == "gated":
            self.gate_proj = Linear(size + rank, rank, device=device, dtype=dtype, bias=True)
        elif self.kind == "rnn":
            self.joint_proj = Linear(
                2 * rank + size, 3 * rank, device=device, dtype=dtype, bias=True
            )

    def start(self, num_requests: int, like: Tensor) -> Tensor:
        """The recurrence's state before a block, [R, r]; unused by the other kinds."""
        return like.new_zeros((num_requests, self.rank))

    def step(self, previous: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Bias of one position and the next state.

        previous [R] int64, hidden [R, H], state [R, r] -> bias [R, vocab] fp32, state [R, r]
        """
        row = self.markov_w1[previous].to(hidden.dtype)
        if self.gate_proj is not None:
            row = torch.sigmoid(self.gate_proj(torch.cat([hidden, row], dim=-1))) * row
        elif self.joint_proj is not None:
            joint = self.joint_proj(torch.cat([state, row, hidden], dim=-1))
            keep, new, out = joint.chunk(3, dim=-1)
            keep = torch.sigmoid(keep)
            state = keep * state + (1.0 - keep) * torch.tanh(new)
            row = torch.tanh(out)
        return self.markov_w2(row).float(), state


class DSparkDraftModel(DFlashDraftModel):
    """Adds ``markov_head``. The confidence head serves ragged verify, which is not offered."""

    skipped_prefixes = (
        *DFlashDraftModel.skipped_prefixes,
        "confidence_head.",
        "model.confidence_head.",
    )

    def __init__(
        self,
        config: DraftConfig,
        *,
        target: HybridGDNForCausalLM,
        mask_token_id: int,
        device: torch.device,
        dtype: torch.dtype,
        attn_backend: AttentionBackend,
    ) -> None:
        super().__init__(
            config,
            target=target,
            mask_token_id=mask_token_id,
            device=device,
            dtype=dtype,
            attn_backend=attn_backend,
        )
        self.markov_head = MarkovHead(config, device=device, dtype=dtype)

    def weight_slots(self) -> WeightSlots:
        slots, head = super().weight_slots(), self.markov_head
        prefix = f"{self.prefix}markov_head."
        slots.add(f"{prefix}markov_w1.weight", head.markov_w1)
        slots.add(f"{prefix}markov_w2.weight", head.markov_w2.weight)
        for name, linear in (("gate_proj", head.gate_proj), ("joint_proj", head.joint_proj)):
            if linear is None or linear.bias is None:
                continue
            slots.add(f"{prefix}{name}.weight", linear.weight)
            if f"{prefix}{name}.bias" in self.checkpoint_names:
                slots.add(f"{prefix}{name}.bias", linear.bias)
        return slots
