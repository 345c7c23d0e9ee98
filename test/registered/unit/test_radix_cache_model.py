"""The radix tree against a dictionary of prefixes, under random operations on tiny pools.

Catches: a state kept at the wrong end of a split, an evicted prefix that others still need, a wrong
eviction order, lost lock counts, totals that drift. The controls plant such faults.
"""

import random

import numpy as np
import pytest

from sglang.srt.mem_cache.integrity import IntegrityError
from sglang.srt.mem_cache.radix.node import token_key
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.reference_cache import ReferenceCache, ReferenceMismatch

register_cpu_ci(est_time=20, suite="unit")

CAUGHT = (ReferenceMismatch, IntegrityError, AssertionError, ValueError, KeyError)


class TreeAgainstReference:
    """Does the same to both, compares every answer, and frees what the tree gives up."""

    def __init__(self, cache_type, *, seed, page_size, checkpoint, needs_state, num_pages=24):
        self.rng = random.Random(seed)
        self.page = page_size
        self.free_pages = list(range(1, num_pages + 1))
        self.free_states = list(range(1, 9))
        self.num_pages, self.num_states = num_pages, len(self.free_states)
        self.locked: list[tuple[list[int], object, bool]] = []
        self.reference = ReferenceCache(
            page_size=page_size, checkpoint_tokens=checkpoint, needs_state=needs_state
        )
        self.tree = cache_type(
            page_size=page_size,
            checkpoint_tokens=checkpoint,
            needs_state=needs_state,
            free_kv=self._on_free_kv,
            free_state=self._on_free_state,
        )

    def _on_free_kv(self, slots):
        self.reference.on_free_kv(slots)
        self._give_pages(slots)

    def _give_pages(self, slots):
        pages = sorted({int(s) // self.page for s in slots})
        assert len(pages) * self.page == len(slots) and not set(pages) & set(self.free_pages)
        self.free_pages += pages

    def _on_free_state(self, slot):
        self.reference.on_free_state(slot)
        assert slot not in self.free_states
        self.free_states.append(slot)

    def tokens(self):
        """Few distinct tokens and few lengths, so that prefixes collide, split and repeat."""
        length = self.rng.randint(0, 9 * self.page)
        stem = self.rng.choice([[1, 1, 1, 1], [1, 2, 1, 2], [2, 2, 1, 1]])
        tokens = (stem * length)[:length]
        for _ in range(self.rng.randint(0, 2)):
            if tokens:
                tokens[self.rng.randrange(len(tokens))] = self.rng.randint(1, 3)
        return tokens

    def step(self):
        actions = (
            self.insert, self.insert, self.match, self.lock, self.unlock, self.attach,
            self.attach, self.evict_kv, self.evict_states, self.touch, self.take,
        )  # fmt: skip
        self.rng.choice(actions)()
        self.check()

    def check(self):
        self.tree.check_integrity()
        tree = self.tree
        counts = (
            tree.num_kv_tokens,
            tree.num_evictable_kv_tokens,
            tree.num_states,
            tree.num_evictable_states,
        )
        assert counts == self.reference.counts()
        assert len(self.free_pages) * self.page + tree.num_kv_tokens == self.num_pages * self.page
        assert len(self.free_states) + tree.num_states == self.num_states

    def match(self):
        tokens = self.tokens()
        limit = self.rng.randint(0, len(tokens))
        found = self.tree.match(token_key(tokens), limit)
        got = (found.cached_len, found.kv_matched_len, found.branching_len)
        assert got == self.reference.match(tokens, limit)
        slots = self.tree.slots_between(found.node, 0, found.cached_len)
        assert slots.tolist() == self.reference.slots(tokens, found.cached_len)
        if self.tree.needs_state and found.cached_len:
            assert (
                found.node.state_slot
                == self.reference.states[tuple(tokens[: found.cached_len])].slot
            )
        return tokens, found

    def insert(self):
        tokens = self.tokens()
        num_pages = len(tokens) // self.page
        if num_pages > len(self.free_pages):
            self.evict_kv(num_pages - len(self.free_pages))
        if not num_pages or num_pages > len(self.free_pages):
            return
        pages = [self.free_pages.pop() for _ in range(num_pages)]
        slots = np.array([p * self.page + i for p in pages for i in range(self.page)])
        found = self.tree.insert(token_key(tokens), slots)
        assert found.existing_len == self.reference.insert(tokens, slots)
        assert found.node.end == len(slots)
        self._give_pages(slots[: found.existing_len])

    def attach(self):
        tokens, found = self.match()
        length = self.rng.randint(0, found.kv_matched_len // self.page + 1) * self.page
        if not length or length > len(tokens):
            return
        if not self.free_states:
            self.evict_states()
        if not self.free_states:
            return
        slot = self.free_states.pop()
        taken = self.tree.attach_state(token_key(tokens), length, slot)
        assert taken == self.reference.attach_state(tokens, length, slot)
        if not taken:
            self.free_states.append(slot)

    def lock(self):
        if len(self.locked) > 4:
            return
        tokens, found = self.match()
        node = self.tree.end_node(found)
        prefix = tokens[: found.cached_len]
        self.tree.lock(node)
        self.reference.lock(prefix, len(prefix))
        with_state = node.state_slot >= 0 and self.rng.random() < 0.5
        if with_state:
            self.tree.lock_state(node)
            self.reference.lock_state(prefix, len(prefix))
        self.locked.append((prefix, node, with_state))

    def unlock(self):
        if not self.locked:
            return
        prefix, node, with_state = self.locked.pop(self.rng.randrange(len(self.locked)))
        assert node.end == len(prefix)
        if with_state:
            self.tree.unlock_state(node)
            self.reference.unlock_state(prefix, len(prefix))
        self.tree.unlock(node)
        self.reference.unlock(prefix, len(prefix))

    def touch(self):
        tokens, found = self.match()
        self.tree.touch(self.tree.end_node(found))
        self.reference.touch(tokens, found.cached_len)

    def take(self):
        tokens, found = self.match()
        node = found.node
        if node.end == found.cached_len and node.state_slot >= 0 and node.state_lock == 0:
            slot = self.tree.take_state(node)
            assert slot == self.reference.take_state(tokens, found.cached_len)
            self.free_states.append(slot)

    def evict_kv(self, num_pages=None):
        wanted = (num_pages or self.rng.randint(1, 6)) * self.page
        could = self.tree.num_evictable_kv_tokens
        self.reference.begin_evict("kv")
        freed = self.tree.evict_kv(wanted)
        self.reference.end_evict()
        assert freed >= min(wanted, could)

    def evict_states(self):
        could = self.tree.num_evictable_states
        self.reference.begin_evict("states")
        freed = self.tree.evict_states(2)
        self.reference.end_evict()
        assert freed == min(2, could)


LAYOUTS = {
    "page4-states": {"page_size": 4, "checkpoint": 8, "needs_state": True},
    "page1-states": {"page_size": 1, "checkpoint": 4, "needs_state": True, "num_pages": 40},
    "page4-kv-only": {"page_size": 4, "checkpoint": 8, "needs_state": False},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(3))
def test_tree_equals_reference(layout, seed):
    pair = TreeAgainstReference(RadixCache, seed=seed, **LAYOUTS[layout])
    for _ in range(1500):
        pair.step()
    for prefix, node, with_state in list(pair.locked):
        del prefix, node, with_state
        pair.unlock()
    pair.evict_kv(1000)
    pair.check()
    assert len(pair.free_pages) == pair.num_pages and len(pair.free_states) == pair.num_states


class StateFollowsUpperPart(RadixCache):
    """Fault: a split leaves the state with the upper part, under too few tokens."""

    def _split(self, node, num_tokens):
        upper = super()._split(node, num_tokens)
        upper.state_slot, node.state_slot = node.state_slot, -1
        upper.state_access, upper.state_lock = node.state_access, node.state_lock
        node.state_lock = 0
        if upper.state_slot >= 0:
            self._state_queue.push(upper.state_access, upper)
        return upper


class SplitForgetsLocks(RadixCache):
    """Fault: the upper part of a split is not locked by those who lock the lower part."""

    def _split(self, node, num_tokens):
        upper = super()._split(node, num_tokens)
        if upper.kv_lock:
            self.num_evictable_kv_tokens += upper.num_tokens
        upper.kv_lock = 0
        return upper


class KvEvictionLeaksState(RadixCache):
    """Fault: removing a leaf forgets the state it held."""

    def _drop_state(self, node):
        if node.kv_lock == 0 and not node.children:
            self.take_state(node)
        else:
            super()._drop_state(node)


class EvictsNewestState(RadixCache):
    """Fault: states leave in the wrong order."""

    def evict_states(self, num_states):
        nodes = [n for n in self.nodes() if self._is_evictable_state(n)]
        nodes.sort(key=lambda n: -n.state_access)
        for node in nodes[:num_states]:
            self._drop_state(node)
        return min(num_states, len(nodes))


class TouchRefreshesAncestorStates(RadixCache):
    """Fault: a hit keeps the states of all its ancestors young."""

    def touch(self, node):
        super().touch(node)
        walk = node.parent
        while walk is not None:
            if walk.state_slot >= 0:
                walk.state_access = self._clock
                self._state_queue.push(walk.state_access, walk)
            walk = walk.parent


class MatchStopsAtKv(RadixCache):
    """Fault: a hit is as long as the KV, whether or not a state is there."""

    def match(self, key, limit=None):
        self.needs_state = False
        try:
            return super().match(key, limit)
        finally:
            self.needs_state = True


class MatchSplits(RadixCache):
    """Fault: asking changes the tree's recency."""

    def match(self, key, limit=None):
        found = super().match(key, limit)
        if found.cached_len:
            self.touch(self.end_node(found))
        return found


FAULTS = [
    StateFollowsUpperPart, SplitForgetsLocks, KvEvictionLeaksState, EvictsNewestState,
    TouchRefreshesAncestorStates, MatchStopsAtKv, MatchSplits,
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_planted_fault_is_caught(fault):
    pair = TreeAgainstReference(fault, seed=0, **LAYOUTS["page4-states"])
    with pytest.raises(CAUGHT):
        for _ in range(3000):
            pair.step()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
