"""Random numbers of speculation: repeatable, and fresh for every step of a request."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch
from torch import Tensor

from sglang.srt.sampling.sampling_batch import SamplingState, uniforms_at
from sglang.srt.utils.upload import upload

_INDEX_BITS = 12


class Stream(Enum):
    """What a number is for. Streams of one request are independent of each other and of sampling.

    The values are arbitrary odd constants that separate the streams.
    """

    DRAFT = 0x6A09E667F3BCC909
    ACCEPT = 0xBB67AE8584CAA73B
    FINAL = 0x3C6EF372FE94F82B


def stream_uniforms(
    states: Sequence[SamplingState],
    starts: Sequence[int],
    count: int,
    stream: Stream,
    device: torch.device,
) -> Tensor:
    """[R, count] fp64 in [0, 1), from each request's seed and the step's first position.

    A step's numbers belong to the step, not to the position they are used at: drafts that an earlier
    step threw away may have influenced where it stopped, so their numbers must not be used again.
    """
    seeds = [state.seed ^ stream.value for state in states]
    table = uniforms_at(seeds, [start << _INDEX_BITS for start in starts], count)
    return upload(table, device)
