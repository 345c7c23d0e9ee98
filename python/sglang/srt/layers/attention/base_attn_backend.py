"""What a model calls to attend; the only part of a model that reads pools."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class AttentionBackend(ABC):
    """Attends over pools. ``init_forward_metadata`` runs once before each model call."""

    @abstractmethod
    def init_forward_metadata(self, fb: ForwardBatch) -> None:
        """Prepare what all layers of this call share."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: RadixAttention, fb: ForwardBatch
    ) -> Tensor:
        """Store k, v at ``fb.out_cache_loc`` and attend.

        q  [T, N, d]; k, v  [T, Nkv, d], after norm and rotation; returns [T, N, d].
        """
        raise TypeError(f"{type(self).__name__} has no full attention")

    def kv_buffers(self, layer: RadixAttention) -> tuple[Tensor, Tensor] | None:
        """K and V [num_slots, Nkv, d] of ``layer`` for a caller that stores its rows itself and then calls
        ``attend``; None if only ``forward`` stores."""
        return None

    def attend(self, q: Tensor, layer: RadixAttention, fb: ForwardBatch) -> Tensor:
        """``forward`` after this call's keys and values have been stored."""
        raise TypeError(f"{type(self).__name__} does not attend to rows that others stored")

    def forward_linear(
        self,
        mixed_qkv: Tensor,
        a: Tensor,
        b: Tensor,
        layer: RadixLinearAttention,
        fb: ForwardBatch,
    ) -> Tensor:
        """Convolve and run the gated delta rule.

        mixed_qkv  [T, conv_dim] before the convolution; a, b  [T, HV]; returns [T, HV, V].
        """
        raise TypeError(f"{type(self).__name__} has no linear attention")
