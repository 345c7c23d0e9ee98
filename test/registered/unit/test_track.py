"""Track grids, the crossing rule, and which entry of a pair holds which checkpoint.

Catches: a checkpoint grid used for decode, a crossing found one token late, a step past the accepted
ones, a stale entry donated after the pair was swapped.
"""

import numpy as np
import pytest

from sglang.srt.mem_cache.req_kv import ReqKV
from sglang.srt.mem_cache.track import (
    TrackGrids,
    TrackPolicy,
    best_checkpoint,
    branching_point,
    crossing_step,
    crossing_steps,
    decode_track_rows,
    note_checkpoint,
    prefill_track_rows,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="unit")


@pytest.mark.parametrize(
    "page, interval, checkpoint, track",
    [
        (64, 256, 64, 256),
        (1, 256, 64, 256),
        (16, 256, 64, 256),
        (128, 256, 128, 256),
        (48, 96, 192, 192),
        (64, 320, 64, 320),
    ],
)
def test_grids(page, interval, checkpoint, track):
    grids = TrackGrids.resolve(page_size=page, track_interval=interval)
    assert (grids.checkpoint_tokens, grids.track_tokens) == (checkpoint, track)


def test_interval_must_fit_pages():
    with pytest.raises(ValueError, match="--mamba-track-interval 100 .* --page-size 64"):
        TrackGrids.resolve(page_size=64, track_interval=100)


def test_policy_sizes_and_refusals():
    paged = TrackGrids.resolve(page_size=64, track_interval=256)
    flat = TrackGrids.resolve(page_size=1, track_interval=256)

    def resolve(strategy, grids=paged, overlap=True, width=4):
        return TrackPolicy.resolve(
            strategy=strategy, grids=grids, overlap_schedule=overlap, max_step_tokens=width
        )

    assert resolve("extra_buffer").num_entries == 2
    assert resolve("extra_buffer", overlap=False).num_entries == 1
    assert resolve("extra_buffer_lazy", overlap=False).num_entries == 2
    assert resolve("no_buffer", flat, overlap=False).num_entries == 0
    with pytest.raises(ValueError, match="no_buffer needs --page-size 1"):
        resolve("no_buffer", overlap=False)
    with pytest.raises(ValueError, match="disable-overlap-schedule"):
        resolve("no_buffer", flat)
    with pytest.raises(ValueError, match="--mamba-track-interval"):
        resolve("extra_buffer", width=257)
    with pytest.raises(ValueError, match="auto"):
        resolve("auto")


def slow_crossing(before: int, accepted: int, grid: int) -> int:
    """Walk token by token: the last step after which the length is a multiple of the grid."""
    step = -1
    for i in range(accepted):
        if (before + i + 1) % grid == 0:
            step = i
    return step


def test_crossing_equals_walking():
    compared = 0
    for grid in (4, 8, 16):
        for before in range(50):
            for accepted in range(grid + 1):
                want = slow_crossing(before, accepted, grid)
                assert crossing_step(before, accepted, grid) == want
                assert want < max(accepted, 1)
                compared += 1
        lengths = np.arange(50)
        got = crossing_steps(lengths, np.full(50, 3), grid)
        assert got.tolist() == [crossing_step(n, 3, grid) for n in range(50)]
    assert compared > 1000


def test_wrong_crossing_rule_is_caught():
    """Control: counting the boundary from the length after the step finds other steps."""

    def late(before, accepted, grid):
        after = before + accepted
        return -1 if after % grid else accepted - 1

    assert any(late(n, 3, 8) != slow_crossing(n, 3, 8) for n in range(50))


def test_decode_boundary_is_the_length_after_the_token():
    assert [n for n in range(1, 40) if decode_track_rows(n, 16) == 1] == [16, 32]
    assert all(
        (decode_track_rows(n + 1, 16) == 1) == (crossing_step(n, 1, 16) == 0) for n in range(40)
    )


@pytest.mark.parametrize(
    "start, end, branching, rows",
    [
        (0, 63, -1, -1),
        (0, 64, -1, 64),
        (0, 700, -1, 640),
        (512, 700, -1, 128),
        (512, 700, 576, 64),  # the branching point is worth more than the last checkpoint
        (512, 700, 704, 128),  # not in this chunk
        (512, 700, 512, 128),  # at its start: nothing to compute there
        (0, 512, 512, 512),
        (100, 400, -1, -1),  # 100 is no page boundary, so neither is any checkpoint
    ],
)
def test_prefill_rows(start, end, branching, rows):
    grids = TrackGrids.resolve(page_size=64, track_interval=256)
    assert prefill_track_rows(start, end, grids, branching) == rows


@pytest.mark.parametrize(
    "kv_len, state_len, point", [(700, 512, 640), (639, 576, -1), (640, 0, 640), (63, 0, -1)]
)
def test_branching_point(kv_len, state_len, point):
    assert branching_point(kv_len, state_len, 64) == point


def new_kv() -> ReqKV:
    return ReqKV(mamba_ping_pong_track_buffer=[7, 8], mamba_next_track_idx=0)


def test_pair_keeps_the_previous_checkpoint():
    kv = new_kv()
    assert best_checkpoint(kv, 10_000) is None
    note_checkpoint(kv, 256, 2)
    assert (kv.mamba_next_track_idx, best_checkpoint(kv, 300)) == (1, (0, 256))
    assert best_checkpoint(kv, 255) is None
    note_checkpoint(kv, 512, 2)
    assert best_checkpoint(kv, 512) == (1, 512)
    assert best_checkpoint(kv, 511) == (0, 256)  # the output was cut before 512
    note_checkpoint(kv, 768, 2)
    assert best_checkpoint(kv, 511) is None  # 256 has been overwritten
    assert best_checkpoint(kv, 767) == (1, 512)


def test_single_entry_never_offers_what_it_overwrote():
    kv = ReqKV(mamba_ping_pong_track_buffer=[7], mamba_next_track_idx=0)
    note_checkpoint(kv, 256, 1)
    note_checkpoint(kv, 512, 1)
    assert best_checkpoint(kv, 600) == (0, 512)
    assert best_checkpoint(kv, 511) is None


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
