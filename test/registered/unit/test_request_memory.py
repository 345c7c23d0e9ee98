"""RequestMemory over real pools: admission, sharing, tracking, retraction, release.

Each test names the fault it catches; states and KV carry hashes of the tokens they stand for.
"""

import numpy as np
import pytest

from sglang.srt.mem_cache.integrity import IntegrityError
from sglang.srt.mem_cache.radix.node import token_key
from sglang.srt.mem_cache.request_memory import RequestMemory
from sglang.srt.mem_cache.request_slots import RequestSlots
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.memory_rig import MemoryRig, RigConfig, RigRequest

register_cpu_ci(est_time=10, suite="unit")

BIG = RigConfig(
    num_tokens=4096,
    num_states=24,
    num_rows=8,
    page_size=64,
    state_chunk=64,
    track_interval=256,
    max_context_len=1600,
)


def run(rig, prompt, num_output, *, chunk=512, width=1, accept=None, req=None):
    """Prefill, then steps of ``accept`` accepted tokens until ``num_output`` exist; not finished."""
    req = req or RigRequest(list(prompt), num_output)
    assert rig.admit(req, chunk)
    while req.kv.committed_len < len(req.token_ids()):
        assert rig.prefill(req, chunk)
    if not req.output:
        req.output.append(1000)
    while len(req.output) < num_output:
        accepted = min(accept or width, num_output - len(req.output))
        new = [2000 + len(req.output) + i for i in range(accepted)]
        assert rig.step(req, accepted, accepted, new)
    return req


def prompt_of(length, salt=0):
    return [(i * 7 + salt) % 500 for i in range(length)]


@pytest.mark.parametrize("accept", [1, 2, 3, 4])
@pytest.mark.parametrize("overlap", [False, True])
def test_second_turn_resumes_at_the_track_boundary(accept, overlap):
    """F13, F14: a first turn of 700 tokens passing 256 and 512 gives the second turn 512."""
    rig = MemoryRig(RigConfig(**{**BIG.__dict__, "overlap": overlap}))
    first = run(rig, prompt_of(200), 500, accept=accept)
    assert len(first.token_ids()) == 700
    rig.finish(first)
    rig.check()
    second = run(rig, first.token_ids() + prompt_of(50, 3), 4)
    assert second.reported_cached == 512
    rig.finish(second)
    rig.check_idle_and_empty()


def test_prefill_checkpoint_is_the_last_of_64():
    """F21: a 700-token prompt leaves its state at 640, not at the decode grid's 512."""
    rig = MemoryRig(BIG)
    first = run(rig, prompt_of(700), 2, chunk=1024)
    second = run(rig, prompt_of(700) + [9], 2)
    assert second.reported_cached == 640
    for req in (first, second):
        rig.finish(req)
    rig.check_idle_and_empty()


def test_branching_point_gets_a_state():
    """F21, F22: siblings that share 600 tokens find no state there, the third one does."""
    rig = MemoryRig(BIG)
    stem = prompt_of(600)
    reported = []
    for salt in range(3):
        req = run(rig, stem + prompt_of(200, 100 + salt), 2, chunk=1024)
        reported.append(req.reported_cached)
        rig.finish(req)
        rig.check()
    assert reported == [0, 0, 576]


def test_siblings_admitted_together_all_hit():
    """F20, F22: each gets a private copy of the same state."""
    rig = MemoryRig(BIG)
    rig.finish(run(rig, prompt_of(512), 2, chunk=512))
    reqs = [RigRequest(prompt_of(512) + [salt]) for salt in range(4)]
    assert all(rig.admit(req, 64) for req in reqs)
    assert [req.reported_cached for req in reqs] == [512] * 4
    assert len({req.kv.mamba_pool_idx for req in reqs}) == 4
    for req in reqs:
        assert rig.prefill(req, 64)
        rig.check()  # F18: writing to one copy leaves the tree's state alone
    for req in reqs:
        rig.memory.release(req)
    rig.check_idle_and_empty()


def test_output_cut_before_the_boundary_donates_the_earlier_state():
    """F13: tokens accepted past the cut never reach the cache; the pair's other entry does."""
    for overlap, cached in ((True, 256), (False, 0)):
        rig = MemoryRig(RigConfig(**{**BIG.__dict__, "overlap": overlap}))
        req = run(rig, prompt_of(40), 470, width=1)
        assert rig.step(req, 4, 1, [1, 2, 3, 4])  # crosses 512, but only one token is kept
        tokens = req.token_ids()
        assert (req.kv.committed_len, req.kv.mamba_last_track_seqlen, len(tokens)) == (
            513,
            512,
            511,
        )
        rig.finish(req)
        rig.check()
        assert rig.memory.match(tokens + [1]).cached_len == cached


def test_duplicates_are_freed_once_and_the_row_follows_the_tree():
    """Two requests compute the same prompt side by side; the pages of one go back, once."""
    rig = MemoryRig(BIG)
    one, two = RigRequest(prompt_of(320)), RigRequest(prompt_of(320))
    assert rig.admit(one, 512) and rig.admit(two, 512)
    assert rig.prefill(one, 512)
    before = rig.allocator.available_size()
    assert rig.prefill(two, 512)
    assert rig.allocator.available_size() == before + 320
    rows = rig.pool.req_to_token[[one.kv.req_pool_idx, two.kv.req_pool_idx], :320]
    assert rows[0].equal(rows[1])
    rig.check()
    rig.check_prefix(two)
    rig.memory.release(one)
    rig.check_prefix(two)
    rig.memory.release(two)
    rig.check_idle_and_empty()


@pytest.mark.parametrize("short_of", ["rows", "pages", "states"])
def test_admission_is_all_or_nothing(short_of):
    """F26: when one resource is short, the others are as before."""
    small = {"rows": {"num_rows": 1}, "pages": {"num_tokens": 640}, "states": {"num_states": 3}}
    rig = MemoryRig(RigConfig(**{**BIG.__dict__, **small[short_of]}))
    first = RigRequest(prompt_of(500))
    assert rig.admit(first, 512)
    rig.prefill(first, 512)
    before = rig.memory.stats()
    waiting = RigRequest(prompt_of(450, 77))
    assert not rig.admit(waiting, 512)
    assert rig.memory.stats() == before
    assert waiting.kv.req_pool_idx is None and not waiting.kv.holds_mamba
    rig.check()
    rig.memory.release(first)
    assert rig.admit(waiting, 512)
    rig.memory.release(waiting)
    rig.check_idle_and_empty()


def test_release_clears_every_reference():
    """F25, F27, F35: nothing of a released request stays, and releasing again does nothing."""
    rig = MemoryRig(RigConfig(**{**BIG.__dict__, "overlap": True}))
    rig.finish(run(rig, prompt_of(300), 2))
    req = RigRequest(prompt_of(400))
    assert rig.admit(req, 128) and req.kv.cached_len == 256
    row = req.kv.req_pool_idx
    assert rig.pool.req_to_token[row, :384].all()
    rig.memory.release(req)
    assert not rig.pool.req_to_token[row].any()
    assert vars(req.kv) == vars(RigRequest([]).kv)
    rig.memory.release(req)
    rig.check_idle_and_empty()


def test_hand_over_is_skipped_when_no_state_slot_is_left():
    """F28: the slot a hand-over needs is never taken from a request; the state goes at finish."""
    rig = MemoryRig(RigConfig(**{**BIG.__dict__, "num_states": 4, "num_rows": 2}))
    one, two = RigRequest(prompt_of(640)), RigRequest(prompt_of(640, 5))
    assert rig.admit(one, 320) and rig.admit(two, 320)
    assert rig.prefill(one, 320) and rig.tree.num_states == 0
    rig.check()
    assert one.kv.mamba_last_track_seqlen == 320
    rig.retract(one)
    assert rig.tree.num_states == 1
    assert rig.memory.match(prompt_of(640)).cached_len == 320
    rig.memory.release(two)
    rig.check_idle_and_empty()


@pytest.mark.parametrize("num_states", [2, 3])
def test_last_state_is_moved_when_it_cannot_be_copied(num_states):
    """F37: with as many slots as one request needs, a hit neither deadlocks nor is lost."""
    rig = MemoryRig(RigConfig(**{**BIG.__dict__, "num_states": num_states}))
    rig.finish(run(rig, prompt_of(300), 2))
    req = run(rig, prompt_of(300) + [5] * 30, 2)
    assert req.reported_cached == 256
    rig.finish(req)
    rig.check_idle_and_empty()


@pytest.mark.parametrize("delta", [-1, 0, 1])
@pytest.mark.parametrize("strategy", ["extra_buffer", "extra_buffer_lazy", "no_buffer"])
def test_retraction_resumes_where_it_stood(delta, strategy):
    """F33: at k*page-1, k*page, k*page+1 the resumed request hits and loses no token."""
    page = 1 if strategy == "no_buffer" else 64
    rig = MemoryRig(RigConfig(**{**BIG.__dict__, "strategy": strategy, "page_size": page}))
    prompt = prompt_of(300)
    req = run(rig, prompt, 640 + delta - 300, width=1)
    before = req.token_ids()
    length = req.kv.committed_len
    rig.retract(req)
    rig.check()
    assert rig.admit(req, 512)
    assert req.kv.cached_len == (length if strategy == "no_buffer" else 512)
    while req.kv.committed_len < len(before):
        assert rig.prefill(req, 512)
    assert req.token_ids() == before
    rig.finish(req)
    rig.check_idle_and_empty()


def test_many_short_requests_on_a_tiny_pool_leak_nothing():
    """F37: a thousand requests, one at a time, on slots for one."""
    rig = MemoryRig(RigConfig(num_tokens=64, num_states=2, num_rows=1, max_context_len=64))
    for i in range(1000):
        req = run(rig, [i % 37, i % 11, 3, 4, 5, 6, 7, 8, 9], 6, chunk=16, accept=1 + i % 4)
        rig.finish(req)
    rig.check_idle_and_empty()


@pytest.mark.parametrize("radix", [True, False])
def test_flush_refuses_while_requests_hold_memory(radix):
    """F98, and the disabled cache: the same calls work with no tree and nothing is ever cached."""
    rig = MemoryRig(RigConfig(**{**BIG.__dict__, "radix": radix}))
    req = run(rig, prompt_of(300), 3)
    assert not rig.memory.flush()
    rig.check_prefix(req)
    rig.finish(req)
    assert rig.memory.match(prompt_of(300)).cached_len == (256 if radix else 0)
    rig.check_idle_and_empty()


def test_ensure_many_is_all_or_nothing_and_equals_one_by_one():
    """F36: pages reserved for a whole batch; the tail of each goes back at finish."""
    rig = MemoryRig(RigConfig(num_tokens=64, num_rows=4, num_states=8, page_size=4))
    reqs = [RigRequest([i, 2, 3, 4, 5]) for i in range(4)]
    for req in reqs:
        assert rig.admit(req, 8) and rig.prefill(req, 8)
    before = rig.memory.stats()
    assert not rig.memory.ensure_many(reqs, [17] * 4)
    assert rig.memory.stats() == before
    assert rig.memory.ensure_many(reqs, [16, 9, 5, 12])
    assert [req.kv.allocated_len for req in reqs] == [16, 12, 8, 12]
    rig.check()
    for req in reqs:
        rig.memory.finish(req, req.token_ids())
    rig.check_idle_and_empty()


def test_last_page_may_reach_past_the_row():
    """A context length that is no multiple of the page still serves its last token."""
    rig = MemoryRig(RigConfig(max_context_len=50, page_size=4))
    req = RigRequest(list(range(45)))
    assert rig.admit(req, 64) and rig.prefill(req, 64)
    assert rig.memory.ensure(req, 50) and req.kv.allocated_len == 52
    rig.check()
    with pytest.raises(ValueError, match="position 52"):
        rig.memory.ensure(req, 53)
    rig.memory.release(req)


def test_what_can_ever_fit():
    """F44: the largest request is the smaller of pool and row; beyond it admission says why."""
    rig = MemoryRig(RigConfig(num_tokens=128, max_context_len=192))
    assert rig.memory.largest_request() == 128
    assert rig.memory.can_ever_fit(100, 28) and not rig.memory.can_ever_fit(100, 29)
    with pytest.raises(ValueError, match="context length 192"):
        rig.memory.admit(RigRequest([1]), token_ids=[1] * 200, num_new_tokens=200)
    tight = MemoryRig(RigConfig(num_states=1))
    assert not tight.memory.can_ever_fit(1, 1)


def test_limit_keeps_rows_to_compute():
    """F73: rows whose log probabilities are wanted are never taken from the cache."""
    rig = MemoryRig(BIG)
    rig.finish(run(rig, prompt_of(640), 2, chunk=64))
    assert rig.memory.match(prompt_of(640)).cached_len == 640
    assert rig.memory.match(prompt_of(640), limit=639).cached_len == 576
    req = RigRequest(prompt_of(640))
    assert rig.memory.admit(req, token_ids=req.prompt, num_new_tokens=64, limit=100)
    assert req.kv.cached_len == 64
    rig.memory.release(req)


def test_pool_and_policy_must_agree():
    """F30: a pool with track slots that nobody uses is refused."""
    rig = MemoryRig(RigConfig())
    with pytest.raises(ValueError, match="1 track slots per request"):
        RequestMemory(slots=RequestSlots(rig.pool), allocator=rig.allocator, tree=None, policy=None)


def test_integrity_check_sees_what_it_must():
    """Control: a lost page, a lost state and a wrong row are each reported."""
    faults = {
        "KV slots": lambda rig, req: rig.allocator.alloc(4),
        "state slots": lambda rig, req: rig.pool.mamba_allocator.alloc_ids(1),
        "device row": lambda rig, req: rig.pool.req_to_token[req.kv.req_pool_idx].add_(1),
        "lengths": lambda rig, req: setattr(req.kv, "allocated_len", 2),
        "state slot is held twice": lambda rig, req: req.kv.mamba_ping_pong_track_buffer.append(
            req.kv.mamba_pool_idx
        ),
    }
    for message, plant in faults.items():
        rig = MemoryRig(RigConfig())
        req = RigRequest(list(range(20)))
        assert rig.admit(req, 20) and rig.prefill(req, 20)
        rig.check()
        plant(rig, req)
        with pytest.raises(IntegrityError, match=message if message != "lengths" else None):
            rig.memory.check_integrity()


def test_arrays_and_lists_are_the_same_prefix():
    rig = MemoryRig(BIG)
    rig.finish(run(rig, prompt_of(300), 2))
    as_list = rig.memory.match(prompt_of(300))
    assert rig.memory.match(np.array(prompt_of(300))) == as_list
    for wrong in (
        [-1, 3],
        [3, 1 << 31],
        [3, 1 << 40],
        [[1, 2]],
        np.array([-1]),
        np.array([1 << 31]),
    ):
        with pytest.raises(ValueError, match="token_ids"):
            rig.memory.match(wrong)
    top = [0, 5, (1 << 31) - 1]
    assert token_key([]) == b"" and token_key(top) == np.array(top, dtype="<i4").tobytes()
    assert token_key(tuple(top)) == token_key(np.array(top)) == token_key(top)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
