"""Launches of the chunked prefill's two kernels over one layer's prompts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from sglang.kernels import triton_support
from sglang.kernels.ops.attention.fla import prefill_kernels
from sglang.kernels.ops.attention.fla.chunk_delta_h import CHUNK_SIZE
from sglang.kernels.ops.attention.fla.prefill_launch import PrefillTiles, launch_options
from sglang.kernels.ops.attention.fla.prefill_plan import PrefillPlan, PrefillTokens

_COPY_ALIGNMENT = 16


@dataclass(frozen=True)
class PrefillScratch:
    """What the chunk kernel leaves for the state kernel; names and shapes are those of `prefill_chunk_kernel`."""

    solved: torch.Tensor
    attn: torch.Tensor
    q_coef: torch.Tensor
    k_coef: torch.Tensor
    s_coef: torch.Tensor
    decay: torch.Tensor

    @staticmethod
    def allocate(x: PrefillTokens, plan: PrefillPlan) -> PrefillScratch:
        blocks = (plan.chunks.shape[0], x.v.shape[1])
        squares = x.q.new_empty(2, *blocks, CHUNK_SIZE, CHUNK_SIZE)
        coef = torch.empty(3, *blocks, CHUNK_SIZE, dtype=torch.float32, device=x.q.device)
        return PrefillScratch(
            solved=squares[0],
            attn=squares[1],
            q_coef=coef[0],
            k_coef=coef[1],
            s_coef=coef[2],
            decay=torch.empty(blocks, dtype=torch.float32, device=x.q.device),
        )


def _copies(tensor: torch.Tensor) -> bool:
    """Whether the copy engine takes the rows of `tensor` [T, H, D] as they lie."""
    size = tensor.element_size()
    pitches = (tensor.data_ptr(), tensor.stride(0) * size, tensor.stride(1) * size)
    return all(pitch % _COPY_ALIGNMENT == 0 for pitch in pitches)


def _rows(tensor: torch.Tensor, columns: int) -> TensorDescriptor:
    """Loads of [CHUNK_SIZE, columns] from rows [T, H, D], a head beginning H strides to the right."""
    width = (tensor.shape[1] - 1) * tensor.stride(1) + tensor.shape[2]
    shape, strides = [tensor.shape[0], width], [tensor.stride(0), 1]
    return TensorDescriptor(tensor, shape, strides, [CHUNK_SIZE, columns])


def _squares(tensor: torch.Tensor) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(tensor.view(-1, CHUNK_SIZE), [CHUNK_SIZE, CHUNK_SIZE])


def run_chunks(
    x: PrefillTokens, plan: PrefillPlan, scratch: PrefillScratch, tiles: PrefillTiles, scale: float
) -> None:
    """Fill the scratch."""
    tile, value_heads = tiles.chunk, x.v.shape[1]
    prefill_kernels.prefill_chunk_kernel[(value_heads, plan.chunks.shape[0])](
        x.q,
        x.k,
        x.a,
        x.b,
        x.A_log,
        x.dt_bias,
        scratch.solved,
        scratch.attn,
        scratch.q_coef,
        scratch.k_coef,
        scratch.s_coef,
        scratch.decay,
        plan.chunks,
        scale,
        x.a.stride(0),
        x.b.stride(0),
        *x.q.stride()[:2],
        *x.k.stride()[:2],
        HV=value_heads,
        GROUP=value_heads // x.q.shape[1],
        K=x.q.shape[2],
        C=CHUNK_SIZE,
        SOLVE=tile.solve_precision,
        BLOCK_D=min(tile.block_d, x.q.shape[2]),
        DOT=tiles.dot_precision,
        **launch_options(tile),
    )


def run_states(
    x: PrefillTokens,
    plan: PrefillPlan,
    scratch: PrefillScratch,
    tiles: PrefillTiles,
    pool: torch.Tensor,
    slots: torch.Tensor,
    track_dests: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Walk every prompt: `out` [T, HV, V], boundary states and last states in `pool`."""
    tile, (value_heads, dim_v) = tiles.state, x.v.shape[1:]
    block_v, dim_k = min(tile.block_v, dim_v), x.q.shape[2]
    copies = tile.copy_engine and torch.version.hip is None
    copies = copies and all(_copies(t) for t in (x.q, x.k, x.v))
    if copies and tile.in_order and triton_support.runs_on_hopper(x.q.device):
        from sglang.kernels.ops.attention.fla import prefill_hopper  # needs Gluon

        if prefill_hopper.serves(x):
            prefill_hopper.walk_in_order(x, plan, scratch, pool, slots, track_dests, out)
            return
    moved = (None,) * 6
    if copies:
        own = (_rows(x.q, dim_k), _rows(x.k, dim_k), _rows(x.v, block_v))
        moved = (*own, _squares(scratch.solved), _squares(scratch.attn), _rows(out, block_v))
    grid = (dim_v // block_v, value_heads, len(plan.lengths))
    prefill_kernels.prefill_state_kernel[grid](
        x.q,
        x.k,
        x.v,
        scratch.solved,
        scratch.attn,
        scratch.q_coef,
        scratch.k_coef,
        scratch.s_coef,
        scratch.decay,
        *moved,
        out,
        pool,
        slots,
        track_dests,
        plan.requests,
        pool.shape[0],
        pool.stride(0),
        *x.q.stride()[:2],
        *x.k.stride()[:2],
        *x.v.stride()[:2],
        HV=value_heads,
        GROUP=value_heads // x.q.shape[1],
        K=dim_k,
        V=dim_v,
        C=CHUNK_SIZE,
        BV=block_v,
        STAGES=tile.num_stages,
        HAS_DESTS=track_dests is not None,
        COPY_ENGINE=copies,
        DOT=tiles.dot_precision,
        **launch_options(tile),
    )
