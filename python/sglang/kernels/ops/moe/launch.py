"""Tiles of the grouped expert GEMM, as data; FP8 ones are the fastest of ``benchmark/gpu_kernels/sweep.py``."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang.kernels.ops.quantization.launch import SMALL_ROWS, check_gated, on_amd


@dataclass(frozen=True)
class ExpertTile:
    """Rows of one expert x output columns of one program.

    ``block_k`` is for bf16; FP8 takes one scale block. ``weights_first`` lets the weight's rows be the
    product's rows: Hopper multiplies FP8 in units of 64 rows, and an expert has a few tokens. Of the rest
    see ``GemmTile``; descriptors are the weight's alone, since the rows of x are gathered.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    weights_first: bool
    parts: int = 1
    descriptors: bool = False
    scales_ahead: bool = False


@dataclass(frozen=True)
class ExpertTiles:
    """Tiles of the gate and up projection and of the down projection; both have one ``block_m``.

    ``gated``: an FP8 ``up`` ends in silu(gate) * up, quantised, where its halves meet at a scale block's edge.
    Raises: ValueError if the heights differ, or ``up`` has not the parts that gating needs.
    """

    up: ExpertTile
    down: ExpertTile
    gated: bool = False

    def __post_init__(self) -> None:
        if self.up.block_m != self.down.block_m:
            raise ValueError(
                f"tiles of {self.up.block_m} and {self.down.block_m} rows cannot share one order of pairs"
            )
        if self.gated:
            check_gated(self.up.parts, self.up.block_n)

    @property
    def block_m(self) -> int:
        return self.up.block_m


_PLAIN_FEW = ExpertTile(16, 128, 128, num_warps=4, num_stages=4, weights_first=True)
_PLAIN_MANY = ExpertTile(64, 128, 64, num_warps=4, num_stages=3, weights_first=False)

_FP8_FEW = ExpertTiles(
    ExpertTile(16, 256, 128, num_warps=8, num_stages=3, weights_first=True, parts=2),
    ExpertTile(16, 128, 128, num_warps=4, num_stages=3, weights_first=True),
    gated=True,
)
_FP8_MANY = ExpertTiles(
    ExpertTile(64, 256, 128, num_warps=8, num_stages=3, weights_first=False, parts=2),
    ExpertTile(64, 128, 128, 4, 4, weights_first=False, descriptors=True),
    gated=True,
)


_AMD_FP8_FEW = ExpertTiles(
    ExpertTile(16, 256, 128, num_warps=4, num_stages=2, weights_first=True, parts=2),
    ExpertTile(16, 128, 128, num_warps=4, num_stages=2, weights_first=True),
    gated=True,
)
_AMD_FP8_MANY = ExpertTiles(
    ExpertTile(64, 256, 128, num_warps=4, num_stages=2, weights_first=False, parts=2),
    ExpertTile(64, 128, 128, num_warps=4, num_stages=2, weights_first=False),
    gated=True,
)
"""Within 64 KB of shared memory and without descriptors; compiled, never timed."""


def fp8_expert_tiles(*, few: bool, amd: bool) -> ExpertTiles:
    if amd:
        return _AMD_FP8_FEW if few else _AMD_FP8_MANY
    return _FP8_FEW if few else _FP8_MANY


def expert_tiles(num_tokens: int, element_bytes: int, *, fp8: bool) -> ExpertTiles:
    """Decode and verify give an expert a few rows, prompt chunks give it hundreds.

    Elements of 4 bytes (fp32 runs) take half the stages, or the tiles would not fit shared memory.
    """
    few = num_tokens <= SMALL_ROWS
    if fp8:
        return fp8_expert_tiles(few=few, amd=on_amd())
    tile = _PLAIN_FEW if few else _PLAIN_MANY
    if element_bytes > 2:
        tile = replace(tile, num_stages=2)
    return ExpertTiles(tile, tile)
