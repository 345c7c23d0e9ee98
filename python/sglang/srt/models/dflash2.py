"""DFlash2: the DFLASH backbone with convolutions and a selector over each row's best candidates."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sglang.srt.configs.draft_config import DraftConfig
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.linear import Linear
from sglang.srt.model_loader.weight_slots import WeightSlots
from sglang.srt.models.dflash import DFlashDraftModel
from sglang.srt.models.hybrid_gdn import HybridGDNForCausalLM


class CandidateSelector(nn.Module):
    """Scores a candidate by its own logit and by how well it follows the token chosen before it.

    predecessor_codebook, successor_codebook  [vocab, r]; hidden_projection  H -> r
    """

    def __init__(self, config: DraftConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        shape = (config.vocab_size, config.selector_rank)
        self.predecessor_codebook = _table(shape, device, dtype)
        self.successor_codebook = _table(shape, device, dtype)
        self.hidden_projection = Linear(
            config.hidden_size, config.selector_rank, device=device, dtype=dtype
        )

    def pair_scores(self, projected: Tensor, previous: Tensor, candidates: Tensor) -> Tensor:
        """projected [R, r], previous [R], candidates [R, K] -> [R, K] fp32."""
        left = self.predecessor_codebook[previous].float() * projected.float()
        right = self.successor_codebook[candidates].float()
        return torch.einsum("rk,rck->rc", left, right)


class DFlash2DraftModel(DFlashDraftModel):
    """Adds ``candidate_selector``. Raises ValueError when its sizes are missing."""

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
        if config.selector_rank < 1 or config.selector_top_k < 1:
            raise ValueError(
                f"draft checkpoint {config.model_path!r}: selector_rank={config.selector_rank} and "
                f"selector_top_k={config.selector_top_k} must be positive for DFlash2"
            )
        super().__init__(
            config,
            target=target,
            mask_token_id=mask_token_id,
            device=device,
            dtype=dtype,
            attn_backend=attn_backend,
        )
        self.candidate_selector = CandidateSelector(config, device=device, dtype=dtype)

    def weight_slots(self) -> WeightSlots:
        slots, selector = super().weight_slots(), self.candidate_selector
        prefix = f"{self.prefix}candidate_selector."
        slots.add(f"{prefix}hidden_projection.weight", selector.hidden_projection.weight)
        for name, table in (
            ("predecessor_codebook", selector.predecessor_codebook),
            ("successor_codebook", selector.successor_codebook),
        ):
            # Seen both as a bare parameter and as an embedding module.
            module_name = f"{prefix}{name}.weight"
            is_module = module_name in self.checkpoint_names
            slots.add(module_name if is_module else f"{prefix}{name}", table)
        return slots


def _table(shape: tuple[int, int], device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, device=device, dtype=dtype), requires_grad=False)
