"""Writing a call's keys and values into the paged pool, alone or with norm and rotation."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang.kernels import triton_support
from sglang.kernels.launch_overlap import overlapping

if triton_support.AVAILABLE:
    from sglang.kernels.ops.attention.paged.store_heads_kernel import norm_rope_store_heads_kernel
    from sglang.kernels.ops.attention.paged.store_kernel import (
        norm_rope_store_kernel,
        store_kv_kernel,
    )


@dataclass(frozen=True)
class NormRope:
    """RMSNorm per head and the rotation after it.

    q_weight, k_weight [d]; ``unit_offset`` scales by 1 + weight. cos, sin [positions, r / 2] fp32,
    contiguous: dims j and j + r / 2 turn together.
    """

    q_weight: Tensor
    k_weight: Tensor
    cos: Tensor
    sin: Tensor
    eps: float
    unit_offset: bool


@dataclass(frozen=True)
class StoreLaunch:
    """How ``norm_rope_store`` runs; no choice changes a bit.

    heads      of a row a program; 0: one, by the kernel that loads a head and its rotated partner
    num_warps  at most one a head: a head's squares are added by one warp, in one order
    """

    heads: int = 0
    num_warps: int = 1

    def serves(self, q: Tensor, half: int) -> bool:
        """Whether several heads a program add as one head a program does: 8 elements a thread of one warp."""
        fits = _block(q.shape[-1]) == _WARP_ELEMENTS and q.dtype.itemsize == 2
        return 0 < self.num_warps <= self.heads and fits and _WARP_ELEMENTS % (2 * half) == 0


_WARP_ELEMENTS = 256

FEW_ROWS = 512
STORE_FEW = StoreLaunch(heads=2)
STORE_MANY = StoreLaunch(heads=8, num_warps=2)


def store_launch(num_rows: int) -> StoreLaunch:
    """Few rows want many small programs, many rows want few loads."""
    return STORE_FEW if num_rows <= FEW_ROWS else STORE_MANY


def store_kv(k: Tensor, v: Tensor, slots: Tensor, k_buffer: Tensor, v_buffer: Tensor) -> None:
    """Write rows k, v [T, Nkv, d] to ``slots`` [T] of k_buffer, v_buffer [num_slots, Nkv, d].

    Strides of k and v are free; rows whose last dim is not contiguous are copied first. Values are cast to the buffers' dtype with scale 1;
    a value beyond fp8's range becomes its largest. A slot below 0: nothing is written.
    """
    num_rows, num_heads, head_dim = k.shape
    if not num_rows:
        return
    k, v = _dense_rows(k), _dense_rows(v)
    block = _block(head_dim)
    store_kv_kernel[(num_rows, num_heads)](
        k,
        v,
        slots,
        k_buffer,
        v_buffer,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        k_buffer.stride(0),
        v_buffer.stride(0),
        k_buffer.stride(1),
        v_buffer.stride(1),
        HEAD_DIM=head_dim,
        BLOCK_D=block,
        **overlapping(k),
        num_warps=max(1, block // 256),
    )


def norm_rope_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    norm: NormRope,
    *,
    positions: Tensor,
    slots: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    launch: StoreLaunch | None = None,
) -> Tensor:
    """Norm and rotate q [T, N, d] and k [T, Nkv, d] at ``positions`` [T]; write k and v to ``slots`` [T].

    The result of ``norm_rope`` on q and on k, each rounded to its dtype, and of ``store_kv`` after it,
    in one launch (by ``store_launch`` if None is given). Returns: q normed and rotated, [T, N, d] contiguous; rows of a slot below 0 are undefined.
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    out = torch.empty((num_rows, num_heads, head_dim), dtype=q.dtype, device=q.device)
    if not num_rows:
        return out
    q, k, v = _dense_rows(q), _dense_rows(k), _dense_rows(v)
    block, half = _block(head_dim), norm.cos.shape[1]
    launch = store_launch(num_rows) if launch is None else launch
    tensors = (q, k, v, norm.q_weight, norm.k_weight, norm.cos, norm.sin, positions, slots, out)
    strides = [each.stride()[:2] for each in (q, k, v, out)]
    pools = (k_buffer.stride(0), v_buffer.stride(0), k_buffer.stride(1), v_buffer.stride(1))
    arguments = (*tensors, k_buffer, v_buffer, *itertools.chain(*strides), *pools)
    if launch.serves(q, half):
        tiles = -(-num_heads // launch.heads) + 2 * -(-num_kv_heads // launch.heads)
        is_bf16 = q.dtype is torch.bfloat16 and k.dtype is torch.bfloat16
        norm_rope_store_heads_kernel[(num_rows * tiles,)](
            *arguments,
            norm.eps,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HALF=half,
            UNIT_OFFSET=norm.unit_offset,
            HEAD_DIM=head_dim,
            BLOCK_D=block,
            BLOCK_H=launch.heads,
            PAIRED=is_bf16 and triton_support.is_hopper_or_later(q.device),
            **overlapping(q),
            num_warps=launch.num_warps,
        )
        return out
    norm_rope_store_kernel[(num_rows, num_heads + 2 * num_kv_heads)](
        *arguments,
        num_heads,
        num_kv_heads,
        half,
        norm.eps,
        UNIT_OFFSET=norm.unit_offset,
        HEAD_DIM=head_dim,
        BLOCK_D=block,
        **overlapping(q),
        num_warps=max(1, block // 256),
    )
    return out


def _dense_rows(x: Tensor) -> Tensor:
    """x itself if the kernels can read it, whose pointers step by one along the last dim."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _block(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()
