"""Launch settings of paged attention, as data.

Values follow from ``benchmark/gpu_kernels/attention.py`` on an H200 with heads of 256, and its
ATTENTION_NOTES.md says from which; those of smaller heads and of short chunks are guesses from tile
arithmetic, and so is where a chunk counts as short.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PagedLaunch:
    """Tile of one program: query rows x context tokens; and how it is run."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class HopperLaunch:
    """Ring of the kernel that fetches with the copy engine: tokens of a block, blocks held at once."""

    block_n: int = 64
    num_stages: int = 2


@dataclass(frozen=True)
class SplitRule:
    """How many context tokens one split has: a function of the request's own context alone.

    ``max_splits`` (a power of two) splits at most, of at least ``min_tokens`` each; every split is a
    multiple of ``step_tokens``, which a block of context must divide.
    """

    min_tokens: int = 256
    step_tokens: int = 64
    max_splits: int = 32

    def split_tokens(self, context: int) -> int:
        """Tokens of one split of ``context`` tokens, as the kernels compute it."""
        step = self.step_tokens
        per_split = -(-context // self.max_splits)
        return max(-(-per_split // step) * step, self.min_tokens)

    def num_splits(self, context: int) -> int:
        """Splits of ``context`` tokens; never falls as the context grows within one split size."""
        return -(-context // self.split_tokens(context))

    def workspace_bytes(self, rows: int, num_heads: int, head_dim: int, itemsize: int) -> int:
        """Bytes of a ``SplitWorkspace`` for ``rows`` whose partial results take ``itemsize`` each."""
        return rows * num_heads * self.max_splits * (head_dim * itemsize + 4)


@dataclass(frozen=True)
class ShortChunks:
    """Prompt chunks that split their context: so few rows after so long a context leave a GPU idle whole."""

    max_rows: int = 256
    min_context: int = 4_096

    def covers(self, rows: int, prefix: int) -> bool:
        """Whether a request's ``rows`` after ``prefix`` tokens are one: a matter of that request alone."""
        return 0 < rows <= self.max_rows and prefix + rows >= self.min_context


SPLITS = SplitRule()
SHORT_CHUNKS = ShortChunks()
PROMPT_CHUNKS_ON_HOPPER: HopperLaunch | None = HopperLaunch()
"""Serves prompt chunks wherever it can; None leaves them to ``many_rows``."""


def few_rows(head_dim: int, group_rows: int, *, amd: bool = False) -> PagedLaunch:
    """Decode and verify: ``group_rows`` query rows share one KV head."""
    block_m = min(max(16, 1 << (group_rows - 1).bit_length()), 64)
    if amd:
        return PagedLaunch(block_m, _amd_block(head_dim), 4, 2)
    return PagedLaunch(block_m, 64, 4, 3 if head_dim <= 128 else 2)


def many_rows(head_dim: int, *, amd: bool = False) -> PagedLaunch:
    """Prompt chunks over their whole context."""
    if amd:
        return PagedLaunch(128, _amd_block(head_dim), 8, 2)
    return PagedLaunch(128, 128 if head_dim <= 128 else 64, 8, 2)


def short_chunks(head_dim: int, *, amd: bool = False) -> PagedLaunch:
    """Prompt chunks that split their context; the tile does not follow the rows."""
    if amd:
        return many_rows(head_dim, amd=True)
    return PagedLaunch(128, 64, 8, 3 if head_dim <= 128 else 2)


def _amd_block(head_dim: int) -> int:
    """Context tokens that fit the 64 KiB of shared memory beside a tile of rows."""
    return 64 if head_dim <= 128 else 32


def combine_warps(max_splits: int) -> int:
    """Warps of the program that reads ``max_splits`` partial results of one row and head at once."""
    return max(4, min(max_splits // 8, 16))
