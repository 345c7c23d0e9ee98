"""Where a step launched ahead may store a boundary state: never over the latest checkpoint.

The step before it may turn out to have ended the request, and then the tree gets that checkpoint.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang.srt.mem_cache.req_kv import ReqKV
from sglang.srt.mem_cache.state_tracker import StateTracker
from sglang.srt.mem_cache.track import TrackGrids, TrackPolicy
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="unit")

GRID = 256


class NoFreeStates:
    num_free_states = 0

    def alloc_state(self) -> int:
        return -1

    def evict_states(self, count: int) -> None:
        """Everything is held."""


@pytest.fixture
def tracker():
    grids = TrackGrids.resolve(page_size=64, track_interval=GRID)
    policy = TrackPolicy("extra_buffer_lazy", grids, 2, max_step_tokens=4)
    return StateTracker(policy, NoFreeStates(), NoFreeStates())


def request(entries: list[int], following: int, latest: int | None):
    kv = ReqKV(committed_len=GRID - 3, mamba_ping_pong_track_buffer=entries)
    kv.mamba_next_track_idx, kv.mamba_last_track_idx = following, latest
    kv.mamba_last_track_seqlen = None if latest is None else GRID
    return SimpleNamespace(kv=kv)


def test_the_other_entry_is_not_taken_when_it_holds_the_latest_checkpoint(tracker):
    ahead, alone = (request([7, -1], 1, 0) for _ in range(2))
    assert tracker.slot_for_decode(ahead, 8, is_ahead=True) == -1
    assert ahead.kv.mamba_next_track_idx == 1
    assert tracker.slot_for_decode(alone, 8, is_ahead=False) == 7
    assert alone.kv.mamba_next_track_idx == 0


def test_nor_is_the_next_entry(tracker):
    assert tracker.slot_for_decode(request([7, 9], 0, 0), 8, is_ahead=True) == -1
    assert tracker.slot_for_decode(request([7, 9], 0, 0), 8, is_ahead=False) == 7


def test_any_other_entry_may_be_written_ahead(tracker):
    assert tracker.slot_for_decode(request([7, 9], 1, 0), 8, is_ahead=True) == 9
    assert tracker.slot_for_decode(request([7, 9], 0, None), 8, is_ahead=True) == 7


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
