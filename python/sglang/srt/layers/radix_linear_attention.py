"""What a linear-attention backend must know of a GDN layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RadixLinearAttention(nn.Module):
    """Geometry and recurrence parameters of one GDN layer.

    conv_weights  [conv_dim, W] compute dtype, last tap multiplies the current token; no bias
    A_log, dt_bias  [HV] fp32
    Channel order of the convolution: all q heads, all k heads, all v heads.
    """

    def __init__(
        self,
        *,
        layer_id: int,
        num_k_heads: int,
        num_v_heads: int,
        head_k_dim: int,
        head_v_dim: int,
        conv_kernel_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.num_q_heads = num_k_heads
        self.num_k_heads = num_k_heads
        self.num_v_heads = num_v_heads
        self.head_q_dim = head_k_dim
        self.head_k_dim = head_k_dim
        self.head_v_dim = head_v_dim
        self.key_dim = num_k_heads * head_k_dim
        self.value_dim = num_v_heads * head_v_dim
        self.conv_dim = 2 * self.key_dim + self.value_dim
        self.activation = "silu"
        self.bias: Tensor | None = None
        self.conv_weights = _parameter((self.conv_dim, conv_kernel_size), dtype, device)
        self.A_log = _parameter((num_v_heads,), torch.float32, device)
        self.dt_bias = _parameter((num_v_heads,), torch.float32, device)


def _parameter(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype, device=device), requires_grad=False)
