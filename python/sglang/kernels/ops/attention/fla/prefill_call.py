"""Launches of the chunked prefill's two kernels over one layer's prompts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.kernels.ops.attention.fla import prefill_kernels
from sglang.kernels.ops.attention.fla.chunk_delta_h import CHUNK_SIZE
from sglang.kernels.ops.attention.fla.prefill_launch import PrefillTiles, launch_options
from sglang.kernels.ops.attention.fla.prefill_plan import PrefillPlan, PrefillTokens


@dataclass(frozen=True)
class PrefillScratch:
    """What the chunk kernel leaves for the state kernel: a block per chunk and value head, so that only the
    prompts' own rows need masks. Names and shapes are those of `prefill_chunk_kernel`."""

    w: torch.Tensor
    u: torch.Tensor
    attn: torch.Tensor
    q_coef: torch.Tensor
    k_coef: torch.Tensor
    decay: torch.Tensor

    @staticmethod
    def allocate(x: PrefillTokens, plan: PrefillPlan) -> PrefillScratch:
        value_heads, dim_v = x.v.shape[1:]
        blocks = (plan.chunks.shape[0], value_heads)
        coef = torch.empty(2, *blocks, CHUNK_SIZE, dtype=torch.float32, device=x.q.device)
        return PrefillScratch(
            w=x.q.new_empty(*blocks, CHUNK_SIZE, x.q.shape[2]),
            u=x.q.new_empty(*blocks, dim_v, CHUNK_SIZE),
            attn=x.q.new_empty(*blocks, CHUNK_SIZE, CHUNK_SIZE),
            q_coef=coef[0],
            k_coef=coef[1],
            decay=torch.empty(blocks, dtype=torch.float32, device=x.q.device),
        )


def _shape(x: PrefillTokens, tiles: PrefillTiles) -> dict[str, int | str]:
    value_heads, dim_v = x.v.shape[1:]
    return {
        "HV": value_heads,
        "GROUP": value_heads // x.q.shape[1],
        "K": x.q.shape[2],
        "V": dim_v,
        "C": CHUNK_SIZE,
        "DOT": tiles.dot_precision,
    }


def run_chunks(
    x: PrefillTokens, plan: PrefillPlan, scratch: PrefillScratch, tiles: PrefillTiles, scale: float
) -> None:
    """Fill the scratch."""
    tile = tiles.chunk
    grid = (plan.chunks.shape[0], x.v.shape[1] // tile.heads)
    prefill_kernels.prefill_chunk_kernel[grid](
        x.q,
        x.k,
        x.v,
        x.a,
        x.b,
        x.A_log,
        x.dt_bias,
        scratch.w,
        scratch.u,
        scratch.attn,
        scratch.q_coef,
        scratch.k_coef,
        scratch.decay,
        plan.chunks,
        scale,
        x.a.stride(0),
        x.b.stride(0),
        *x.q.stride()[:2],
        *x.k.stride()[:2],
        *x.v.stride()[:2],
        **_shape(x, tiles),
        HEADS=tile.heads,
        BASE=tile.base,
        SOLVE=tile.solve_precision,
        BLOCK_D=min(tile.block_d, x.q.shape[2], x.v.shape[2]),
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
    tile, dim_v = tiles.state, x.v.shape[2]
    block_v = min(tile.block_v, dim_v)
    grid = (dim_v // block_v, x.v.shape[1], len(plan.lengths))
    prefill_kernels.prefill_state_kernel[grid](
        x.q,
        x.k,
        scratch.w,
        scratch.u,
        scratch.attn,
        scratch.q_coef,
        scratch.k_coef,
        scratch.decay,
        out,
        pool,
        slots,
        track_dests,
        plan.requests,
        pool.shape[0],
        pool.stride(0),
        *x.q.stride()[:2],
        *x.k.stride()[:2],
        **_shape(x, tiles),
        BV=block_v,
        HAS_DESTS=track_dests is not None,
        **launch_options(tile),
    )
