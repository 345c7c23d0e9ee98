"""Random traffic on tiny pools under a fake model that checks every state and every KV it reads.

Catches: a state donated under another length, a private copy that is not private, a page freed while
read, duplicates freed twice or never, leaks of rows, pages and slots, requests that starve alone. The
controls plant such faults.
"""

import pytest

from sglang.srt.mem_cache.integrity import IntegrityError
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.request_memory import RequestMemory
from sglang.srt.mem_cache.state_tracker import StateTracker
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.memory_rig import MemoryRig, RandomTraffic, RigConfig

register_cpu_ci(est_time=40, suite="unit")

CONFIGS = {
    "single-entry": RigConfig(),
    "pair": RigConfig(overlap=True),
    "lazy": RigConfig(strategy="extra_buffer_lazy"),
    "no-buffer": RigConfig(strategy="no_buffer", page_size=1),
    "no-cache": RigConfig(radix=False),
    "tight": RigConfig(num_tokens=128, max_context_len=120, num_states=4),
    "tight-pair": RigConfig(num_tokens=128, max_context_len=120, num_states=3, overlap=True),
    "tight-lazy": RigConfig(num_tokens=128, num_states=2, strategy="extra_buffer_lazy"),
    "one-state": RigConfig(strategy="no_buffer", page_size=1, num_states=1),
    "ragged-row": RigConfig(max_context_len=114),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_random_traffic(name):
    config = CONFIGS[name]
    traffic = RandomTraffic(MemoryRig(config), seed=sum(map(ord, name)), longest_prompt=80)
    traffic.run(900)
    wanted = ["admitted", "stepped", "finished", "aborted", "retracted"]
    wanted += ["hit"] if config.radix else []
    assert all(traffic.counts.get(event, 0) > 5 for event in wanted), traffic.counts
    assert traffic.rig.num_checks > 1000


class ForgetsDuplicates(RequestMemory):
    """Fault: pages that the tree had already are never freed."""

    def _insert_kv(self, req, key, num_tokens):
        free, self._allocator.free = self._allocator.free, lambda slots: None
        try:
            super()._insert_kv(req, key, num_tokens)
        finally:
            self._allocator.free = free


class KeepsOldRow(RequestMemory):
    """Fault: the device row still names the freed duplicates."""

    def _insert_kv(self, req, key, num_tokens):
        write, self._slots.write_row = self._slots.write_row, lambda *a: None
        try:
            super()._insert_kv(req, key, num_tokens)
        finally:
            self._slots.write_row = write


class SharesTheMatchedState(RequestMemory):
    """Fault: the matched state is not copied; the request starts from zero."""

    def admit(self, req, **kwargs):
        copy, self._slots.copy_state = self._slots.copy_state, lambda src, dst: None
        try:
            return super().admit(req, **kwargs)
        finally:
            self._slots.copy_state = copy


class ForgetsToClear(RequestMemory):
    """Fault: a cold request continues from whatever its slot held."""

    def admit(self, req, **kwargs):
        clear, self._slots.clear_state = self._slots.clear_state, lambda slot: None
        try:
            return super().admit(req, **kwargs)
        finally:
            self._slots.clear_state = clear


class NotesNothingWhenFinished(RequestMemory):
    """Fault: a finished request's last crossing is not noted, so an overwritten entry is donated."""

    def note_track(self, req, seqlen):
        if seqlen < req.kv.committed_len - 1:
            return
        super().note_track(req, seqlen)


class NotesAnotherEntry(RequestMemory):
    """Fault: the cursor points at an entry that this batch did not write (F16, F17)."""

    def note_track(self, req, seqlen):
        kv = req.kv
        if kv.mamba_ping_pong_track_buffer[1 - kv.mamba_next_track_idx] >= 0:
            kv.mamba_next_track_idx = 1 - kv.mamba_next_track_idx
        super().note_track(req, seqlen)


class CachesRejectedTail(RequestMemory):
    """Fault: positions without final KV are inserted."""

    def _final_prefix(self, req, token_ids):
        key, final_len = super()._final_prefix(req, token_ids)
        return key + b"\1\0\0\0" * 8, min(final_len + 4, req.kv.allocated_len)


class LeaksLockOnAbort(RequestMemory):
    """Fault: releasing keeps the tree locked."""

    def release(self, req):
        node = req.kv.node
        super().release(req)
        if node is not None and node.end:
            self._tree.lock(node)


class HandsOutHalf(RequestMemory):
    """Fault: a refused admission keeps the pages it had taken."""

    def admit(self, req, **kwargs):
        done = super().admit(req, **kwargs)
        if not done and self._allocator.available_size():
            self._allocator.alloc(1)
        return done


MEMORY_FAULTS = [
    ForgetsDuplicates, KeepsOldRow, SharesTheMatchedState, ForgetsToClear,
    NotesNothingWhenFinished, CachesRejectedTail, LeaksLockOnAbort, HandsOutHalf,
]  # fmt: skip

CAUGHT = (AssertionError, IntegrityError, ValueError)


@pytest.mark.parametrize("fault", MEMORY_FAULTS, ids=lambda f: f.__name__)
def test_planted_memory_fault_is_caught(fault):
    rig_type = type("Rig", (MemoryRig,), {"memory_type": fault})
    with pytest.raises(CAUGHT):
        RandomTraffic(rig_type(CONFIGS["single-entry"]), seed=1).run(1500)


def test_planted_cursor_fault_is_caught():
    """Only a pair of entries has a wrong one."""
    rig_type = type("Rig", (MemoryRig,), {"memory_type": NotesAnotherEntry})
    with pytest.raises(CAUGHT):
        RandomTraffic(rig_type(CONFIGS["tight-pair"]), seed=1).run(1500)


class StateFollowsUpperPart(RadixCache):
    """Fault: a split leaves the state with the upper part, under too few tokens."""

    def _split(self, node, num_tokens):
        upper = super()._split(node, num_tokens)
        if node.state_slot >= 0 and node.state_lock == 0:
            upper.state_slot, node.state_slot = node.state_slot, -1
            upper.state_access = node.state_access
            self._state_queue.push(upper.state_access, upper)
        return upper


class ForgetsState(RadixCache):
    """Fault: a state slot that leaves the tree is not freed."""

    def _drop_state(self, node):
        self.take_state(node)


@pytest.mark.parametrize("fault", [StateFollowsUpperPart, ForgetsState], ids=lambda f: f.__name__)
def test_planted_tree_fault_is_caught(fault):
    rig_type = type("Rig", (MemoryRig,), {"tree_type": fault})
    with pytest.raises(CAUGHT):
        RandomTraffic(rig_type(CONFIGS["single-entry"]), seed=1).run(1500)


def test_donating_under_another_length_is_caught(monkeypatch):
    """Fault: the checkpoint is filed one page short of the tokens it holds."""
    donate = StateTracker._donate_checkpoint

    def short(self, req, key, max_len, keep_entry):
        if req.kv.mamba_last_track_seqlen:
            req.kv.mamba_last_track_seqlen -= 4
        donate(self, req, key, max_len, keep_entry)

    monkeypatch.setattr(StateTracker, "_donate_checkpoint", short)
    with pytest.raises(AssertionError, match="tree state"):
        RandomTraffic(MemoryRig(CONFIGS["single-entry"]), seed=1).run(500)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
