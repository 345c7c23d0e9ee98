"""Which requests of a prompt call are attended to in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sglang.kernels.ops.attention.paged.launch import ShortChunks


@dataclass(frozen=True)
class ChunkRun:
    """Requests ``first .. end - 1`` with rows ``row .. end_row - 1`` of the call.

    ``is_split``: all of them split their contexts; otherwise none does.
    """

    first: int
    end: int
    row: int
    end_row: int
    max_query_len: int
    is_split: bool


def plan_chunks(
    query_lens: Sequence[int], prefix_lens: Sequence[int], *, short: ShortChunks
) -> list[ChunkRun]:
    """Runs of neighbours of one kind, in order; those that split have ``short.max_rows`` rows at most.

    How a request is attended to follows from its own chunk and prefix; neighbours decide only which
    launch it is in.
    """
    runs: list[ChunkRun] = []
    row = 0
    for index, (rows, prefix) in enumerate(zip(query_lens, prefix_lens, strict=True)):
        is_split = short.covers(rows, prefix)
        if runs and _joins(runs[-1], row + rows, is_split, short):
            last = runs[-1]
            longest = max(last.max_query_len, rows)
            runs[-1] = replace(last, end=index + 1, end_row=row + rows, max_query_len=longest)
        else:
            runs.append(ChunkRun(index, index + 1, row, row + rows, rows, is_split))
        row += rows
    return runs


def _joins(run: ChunkRun, end_row: int, is_split: bool, short: ShortChunks) -> bool:
    return run.is_split == is_split and not (is_split and end_row - run.row > short.max_rows)
