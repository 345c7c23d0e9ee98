"""Prefix tree over token pages whose nodes may hold a recurrent state.

A hit of a recurrent model is only as long as both KV and state exist: KV may match further, but the
usable prefix ends at the deepest matched node that holds a state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sglang.srt.mem_cache.integrity import IntegrityError
from sglang.srt.mem_cache.radix.node import TOKEN_BYTES, TreeNode, common_prefix_tokens
from sglang.srt.mem_cache.radix.recency import RecencyQueue
from sglang.srt.mem_cache.track import branching_point

NO_SLOTS = np.empty(0, dtype=np.int64)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise IntegrityError(message)


def has_repeats(slots: np.ndarray) -> bool:
    """True if a non-negative integer occurs twice."""
    return len(slots) > 0 and int(np.bincount(slots).max()) > 1


@dataclass(frozen=True)
class MatchResult:
    """What the cache knows of a prefix.

    ``cached_len``      usable tokens: KV and, for a recurrent model, the state after exactly them
    ``kv_matched_len``  tokens whose KV is in the tree, >= ``cached_len``
    ``branching_len``   checkpoint length inside the KV hit beyond the state, worth storing; or -1
    ``node``            node in which the usable prefix ends (its end, or inside it without states)
    ``host_len``        tokens usable once the host tier's part has been loaded, >= ``cached_len``
    """

    node: TreeNode
    cached_len: int
    kv_matched_len: int
    branching_len: int
    host_len: int = 0

    @property
    def usable_len(self) -> int:
        """The length an admission will report as cached, host tier included."""
        return max(self.cached_len, self.host_len)


@dataclass(frozen=True)
class InsertResult:
    """``node`` ends exactly at the inserted length; the first ``existing_len`` tokens were there."""

    node: TreeNode
    existing_len: int


class TreeListener(Protocol):
    """Told of what has entered the tree and of what is about to leave it; the bytes are in place."""

    def on_insert_kv(self, node: TreeNode) -> None: ...

    def on_attach_state(self, node: TreeNode) -> None: ...

    def on_evict_kv(self, node: TreeNode) -> None: ...

    def on_evict_state(self, node: TreeNode) -> None: ...


class RadixCache:
    """Owns the KV slots and state slots that finished work left behind.

    page_size          tokens per page; every length in the tree is a multiple of it
    checkpoint_tokens  grid of branching points
    needs_state        True for a recurrent model: a hit must end at a state
    free_kv            takes an int64 array of whole pages' slots that the tree gives up
    free_state         takes one state slot that the tree gives up
    """

    def __init__(
        self,
        *,
        page_size: int,
        checkpoint_tokens: int,
        needs_state: bool,
        free_kv: Callable[[np.ndarray], None],
        free_state: Callable[[int], None],
    ) -> None:
        if page_size < 1 or checkpoint_tokens % page_size:
            raise ValueError(
                f"checkpoint grid {checkpoint_tokens} must be a multiple of page_size {page_size}"
            )
        self.page_size = page_size
        self.checkpoint_tokens = checkpoint_tokens
        self.needs_state = needs_state
        self.listener: TreeListener | None = None
        self._free_kv = free_kv
        self._free_state = free_state
        self._page_bytes = page_size * TOKEN_BYTES
        self._clock = 0
        self._start_empty()

    def _start_empty(self) -> None:
        self.root = TreeNode(b"", NO_SLOTS, None, 0)
        self.root.kv_lock = 1
        self.num_nodes = 0
        self.num_kv_tokens = 0
        self.num_evictable_kv_tokens = 0
        self.num_states = 0
        self.num_evictable_states = 0
        self._kv_queue = RecencyQueue(
            lambda access, node: access == node.kv_access and self._is_evictable_leaf(node)
        )
        self._state_queue = RecencyQueue(
            lambda access, node: access == node.state_access and self._is_evictable_state(node)
        )

    @staticmethod
    def _is_evictable_leaf(node: TreeNode) -> bool:
        return node.is_attached and not node.children and node.kv_lock == 0

    @staticmethod
    def _is_evictable_state(node: TreeNode) -> bool:
        return node.is_attached and node.state_slot >= 0 and node.state_lock == 0

    def page_floor(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self.page_size

    # -- questions: nothing below changes what a later call can see

    def match(self, key: bytes, limit: int | None = None) -> MatchResult:
        """Longest prefix of ``key`` (see ``token_key``) in the tree, at most ``limit`` tokens."""
        num_tokens = len(key) // TOKEN_BYTES
        end = self.page_floor(num_tokens if limit is None else max(0, min(limit, num_tokens)))
        end_bytes = end * TOKEN_BYTES
        node, usable, pos = self.root, self.root, 0
        partial = 0
        while pos < end_bytes:
            child = node.children.get(key[pos : pos + self._page_bytes])
            if child is None:
                break
            child_bytes = len(child.key)
            if pos + child_bytes <= end_bytes and key.startswith(child.key, pos):
                pos += child_bytes
                node = child
                if child.state_slot >= 0:
                    usable = child
                continue
            partial = self._common_pages(child, key, pos, end_bytes)
            node = child
            break
        kv_len = pos // TOKEN_BYTES + partial
        if not self.needs_state:
            return MatchResult(node, kv_len, kv_len, -1)
        branching = branching_point(kv_len, usable.end, self.checkpoint_tokens)
        return MatchResult(usable, usable.end, kv_len, branching)

    def _common_pages(self, node: TreeNode, key: bytes, pos: int, end_bytes: int) -> int:
        most = min(len(node.key), end_bytes - pos) // TOKEN_BYTES
        return self.page_floor(common_prefix_tokens(node.key, key, pos, most))

    def slots_between(self, node: TreeNode, start: int, end: int) -> np.ndarray:
        """KV slots of positions ``start .. end-1`` on the path that ends in ``node``, a copy."""
        if start >= end:
            return NO_SLOTS
        pieces = []
        walk: TreeNode | None = node
        while walk is not None and walk.end > start:
            pieces.append(walk.slots[max(0, start - walk.start) : max(0, end - walk.start)])
            walk = walk.parent
        return np.concatenate(pieces[::-1])

    def nodes(self) -> Iterator[TreeNode]:
        """Every node but the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    # -- changes

    def touch(self, node: TreeNode) -> None:
        """Mark the KV of the path as just used, and of states only this node's."""
        self._touch_kv(node)
        if node.state_slot >= 0:
            node.state_access = self._clock
            self._state_queue.push(node.state_access, node)

    def lock(self, node: TreeNode) -> None:
        """Keep the KV of the whole path from eviction."""
        walk: TreeNode | None = node
        while walk is not None:
            if walk.kv_lock == 0:
                self.num_evictable_kv_tokens -= walk.num_tokens
            walk.kv_lock += 1
            walk = walk.parent

    def unlock(self, node: TreeNode) -> None:
        """Undo one ``lock``."""
        if node.kv_lock <= max(node.state_lock, 1 if node is self.root else 0):
            raise ValueError(f"node ending at {node.end} is not locked, or its state still is")
        walk: TreeNode | None = node
        while walk is not None:
            walk.kv_lock -= 1
            if walk.kv_lock == 0:
                self.num_evictable_kv_tokens += walk.num_tokens
                if not walk.children:
                    self._kv_queue.push(walk.kv_access, walk)
            walk = walk.parent

    def lock_state(self, node: TreeNode) -> None:
        """Keep this node's state from eviction; its KV must be locked for as long."""
        if node.state_slot < 0 or node.kv_lock <= node.state_lock:
            raise ValueError(f"node ending at {node.end} holds no state, or its KV is not locked")
        if node.state_lock == 0:
            self.num_evictable_states -= 1
        node.state_lock += 1

    def unlock_state(self, node: TreeNode) -> None:
        """Undo one ``lock_state``."""
        if node.state_lock == 0:
            raise ValueError(f"state of the node ending at {node.end} is not locked")
        node.state_lock -= 1
        if node.state_lock == 0:
            self.num_evictable_states += 1
            self._state_queue.push(node.state_access, node)

    def end_node(self, match: MatchResult) -> TreeNode:
        """The node ending exactly at ``match.cached_len``, splitting an edge if it ends inside one."""
        node = match.node
        if match.cached_len == node.end:
            return node
        return self._split(node, match.cached_len - node.start)

    def node_at(self, key: bytes, length: int) -> TreeNode:
        """The node ending exactly at ``length`` tokens of ``key``, whose KV must be in the tree."""
        node, found = self._descend(key, length)
        if found != length:
            raise ValueError(f"the tree holds {found} of the key's first {length} tokens")
        return node

    def insert(self, key: bytes, slots: np.ndarray) -> InsertResult:
        """Add the KV of ``len(slots)`` leading tokens of ``key`` (whole pages).

        Where the tree already has those tokens it keeps its own slots, and the caller still owns
        (and must free or re-point) its slots of positions below ``existing_len``; the rest now
        belongs to the tree. Marks the path as just used.
        """
        num_tokens = len(slots)
        if num_tokens % self.page_size or num_tokens * TOKEN_BYTES > len(key):
            raise ValueError(
                f"cannot insert {num_tokens} slots: page_size {self.page_size}, "
                f"{len(key) // TOKEN_BYTES} tokens"
            )
        node, existing = self._descend(key, num_tokens)
        if existing < num_tokens:
            tail = key[existing * TOKEN_BYTES : num_tokens * TOKEN_BYTES]
            leaf = TreeNode(tail, np.array(slots[existing:], dtype=np.int64), node, num_tokens)
            node.children[tail[: self._page_bytes]] = leaf
            self.num_nodes += 1
            self.num_kv_tokens += leaf.num_tokens
            self.num_evictable_kv_tokens += leaf.num_tokens
            node = leaf
        self._touch_kv(node)
        if existing < num_tokens and self.listener is not None:
            self.listener.on_insert_kv(node)
        return InsertResult(node, existing)

    def attach_state(self, key: bytes, length: int, state_slot: int) -> bool:
        """Give the tree the state after ``length`` tokens; their KV must be in the tree.

        Returns False, and leaves the slot with the caller, if a state is there already or the KV
        is not.
        """
        if length <= 0 or length % self.page_size or length * TOKEN_BYTES > len(key):
            raise ValueError(
                f"a state of {length} tokens needs a positive multiple of page_size "
                f"{self.page_size} within the key's {len(key) // TOKEN_BYTES} tokens"
            )
        node, existing = self._descend(key, length)
        if existing < length:
            return False
        self.touch(node)
        if node.state_slot >= 0:
            return False
        node.state_slot = state_slot
        node.state_access = self._clock
        self.num_states += 1
        self.num_evictable_states += 1
        self._state_queue.push(node.state_access, node)
        if self.listener is not None:
            self.listener.on_attach_state(node)
        return True

    def take_state(self, node: TreeNode) -> int:
        """Move an unlocked state out of the tree: the caller owns the returned slot."""
        if not self._is_evictable_state(node):
            raise ValueError(f"node ending at {node.end} has no state that can be taken")
        slot, node.state_slot = node.state_slot, -1
        self.num_states -= 1
        self.num_evictable_states -= 1
        return slot

    def evict_kv(self, num_tokens: int) -> int:
        """Free at least ``num_tokens`` KV slots from the oldest unlocked leaves; return how many.

        Fewer are freed only when no unlocked leaf is left. States of removed nodes are freed too.
        """
        freed = 0
        while freed < num_tokens:
            node = self._kv_queue.pop()
            if node is None:
                break
            freed += node.num_tokens
            self._remove_leaf(node)
        return freed

    def evict_states(self, num_states: int) -> int:
        """Free up to ``num_states`` of the oldest unlocked states; their KV stays (tombstones)."""
        freed = 0
        while freed < num_states:
            node = self._state_queue.pop()
            if node is None:
                break
            self._drop_state(node)
            freed += 1
        return freed

    def reset(self) -> None:
        """Give up everything. Raises: ValueError while a node is locked."""
        if self.root.kv_lock != 1:
            raise ValueError("cannot reset the prefix cache while requests hold parts of it")
        for node in self.nodes():
            if node.state_slot >= 0:
                self._free_state(node.state_slot)
            self._free_kv(node.slots)
            node.is_attached = False
        self._start_empty()

    # -- inside

    def _touch_kv(self, node: TreeNode) -> None:
        self._clock += 1
        walk: TreeNode | None = node
        while walk is not None:
            walk.kv_access = self._clock
            walk = walk.parent
        if self._is_evictable_leaf(node):
            self._kv_queue.push(node.kv_access, node)

    def _descend(self, key: bytes, num_tokens: int) -> tuple[TreeNode, int]:
        """Node at the end of the common part with ``key[:num_tokens]``, split out if needed."""
        node, pos, end_bytes = self.root, 0, num_tokens * TOKEN_BYTES
        while pos < end_bytes:
            child = node.children.get(key[pos : pos + self._page_bytes])
            if child is None:
                break
            if pos + len(child.key) <= end_bytes and key.startswith(child.key, pos):
                pos += len(child.key)
                node = child
                continue
            common = self._common_pages(child, key, pos, end_bytes)
            return self._split(child, common), pos // TOKEN_BYTES + common
        return node, pos // TOKEN_BYTES

    def _split(self, node: TreeNode, num_tokens: int) -> TreeNode:
        """Cut ``node`` after its first ``num_tokens`` tokens; return the new upper part.

        The state, if any, stays at the end of the lower part: it has consumed all its tokens.
        """
        cut = num_tokens * TOKEN_BYTES
        parent = node.parent
        assert parent is not None and 0 < num_tokens < node.num_tokens
        upper = TreeNode(node.key[:cut], node.slots[:num_tokens], parent, node.start + num_tokens)
        upper.kv_lock = node.kv_lock
        upper.kv_access = node.kv_access
        parent.children[upper.key[: self._page_bytes]] = upper
        node.key, node.slots, node.parent = node.key[cut:], node.slots[num_tokens:], upper
        if node.digests is not None:
            pages = num_tokens // self.page_size
            upper.digests, node.digests = node.digests[:pages], node.digests[pages:]
        upper.children[node.key[: self._page_bytes]] = node
        self.num_nodes += 1
        return upper

    def _drop_state(self, node: TreeNode) -> None:
        if self.listener is not None:
            self.listener.on_evict_state(node)
        self._free_state(self.take_state(node))

    def _remove_leaf(self, node: TreeNode) -> None:
        if self.listener is not None:
            self.listener.on_evict_kv(node)
        if node.state_slot >= 0:
            self._drop_state(node)
        parent = node.parent
        assert parent is not None
        del parent.children[node.key[: self._page_bytes]]
        node.is_attached = False
        self.num_nodes -= 1
        self.num_kv_tokens -= node.num_tokens
        self.num_evictable_kv_tokens -= node.num_tokens
        self._free_kv(node.slots)
        if self._is_evictable_leaf(parent):
            self._kv_queue.push(parent.kv_access, parent)

    def check_integrity(self) -> None:
        """Recount everything; raises IntegrityError naming the first thing that disagrees."""
        kv_tokens = evictable_kv = states = evictable_states = nodes = 0
        kv_candidates = self._kv_queue.candidates()
        state_candidates = self._state_queue.candidates()
        all_slots, all_states = [], []
        for node in self.nodes():
            where = f"node ending at {node.end}"
            parent = node.parent
            if parent is None or not node.is_attached:
                raise IntegrityError(f"{where} is detached")
            _require(
                parent.children.get(node.key[: self._page_bytes]) is node, f"{where}: bad link"
            )
            _require(
                node.num_tokens > 0 and node.num_tokens % self.page_size == 0, f"{where}: pages"
            )
            _require(
                len(node.key) == node.num_tokens * TOKEN_BYTES, f"{where}: key and slots differ"
            )
            _require(node.start == parent.end, f"{where} starts at {node.start}, not {parent.end}")
            _require(0 <= node.kv_lock <= parent.kv_lock, f"{where}: lock above its parent's")
            _require(node.state_lock <= node.kv_lock, f"{where}: state locked without its KV")
            _require(node.state_lock == 0 or node.state_slot >= 0, f"{where}: locks no state")
            _require(node.kv_access <= parent.kv_access, f"{where} is newer than its parent")
            _require(
                self._is_evictable_leaf(node) == (id(node) in kv_candidates), f"{where}: queue"
            )
            in_queue = id(node) in state_candidates
            _require(self._is_evictable_state(node) == in_queue, f"{where}: state queue")
            nodes += 1
            kv_tokens += node.num_tokens
            evictable_kv += node.num_tokens if node.kv_lock == 0 else 0
            states += node.state_slot >= 0
            evictable_states += self._is_evictable_state(node)
            all_slots.append(node.slots)
            if node.state_slot >= 0:
                all_states.append(node.state_slot)
        found = (nodes, kv_tokens, evictable_kv, states, evictable_states)
        kept = (
            self.num_nodes,
            self.num_kv_tokens,
            self.num_evictable_kv_tokens,
            self.num_states,
            self.num_evictable_states,
        )
        _require(found == kept, f"counts {kept}, but the tree has {found}")
        slots = np.concatenate(all_slots) if all_slots else NO_SLOTS
        _require(not has_repeats(slots), "a KV slot is in the tree twice")
        _require(len(set(all_states)) == len(all_states), "a state slot is in the tree twice")
