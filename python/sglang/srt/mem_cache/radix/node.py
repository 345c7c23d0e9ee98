"""Token keys and the nodes of the prefix tree."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

TOKEN_BYTES = 4
_MAX_TOKEN_ID = np.iinfo(np.int32).max


def token_key(token_ids: Sequence[int] | np.ndarray) -> bytes:
    """Token ids as packed little-endian int32, the form in which prefixes are compared.

    An int32 or int64 array costs far less to pack than a list of Python integers.
    Raises: ValueError for ids below 0 or above int32.
    """
    tokens = _as_array(token_ids)
    if tokens.ndim != 1:
        raise ValueError(f"token_ids must be one-dimensional, got shape {tokens.shape}")
    if tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) > _MAX_TOKEN_ID):
        raise ValueError(
            f"token_ids must lie in 0..{_MAX_TOKEN_ID}, got {tokens.min()}..{tokens.max()}"
        )
    return tokens.astype("<i4").tobytes()


def _as_array(token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    if isinstance(token_ids, list):
        with suppress(TypeError, OverflowError):  # what does not fit is named by the slower way
            return np.array(array("i", token_ids), dtype=np.int32)
    return np.asarray(token_ids, dtype=np.int64)


def common_prefix_tokens(a: bytes, b: bytes, b_offset: int, max_tokens: int) -> int:
    """Number of equal leading tokens of ``a`` and ``b[b_offset:]``, at most ``max_tokens``."""
    left = np.frombuffer(a, dtype="<i4", count=max_tokens)
    right = np.frombuffer(b, dtype="<i4", count=max_tokens, offset=b_offset)
    differs = left != right
    first = int(differs.argmax()) if max_tokens else 0
    return first if max_tokens and differs[first] else max_tokens


class TreeNode:
    """An edge of the tree with the tokens it adds: whole pages, at least one (the root has none).

    ``key`` are the tokens, ``slots`` (int64, one per token) their KV slots, ``end`` the number of
    tokens from the root to the end of this node. ``state_slot`` is the slot of the recurrent state
    after exactly ``end`` tokens, or -1. ``kv_lock`` counts the lockers of this node and of all
    nodes below it, ``state_lock`` those of this node's state alone. Only the tree writes to nodes.
    """

    __slots__ = (
        "key",
        "slots",
        "end",
        "parent",
        "children",
        "state_slot",
        "kv_lock",
        "state_lock",
        "kv_access",
        "state_access",
        "is_attached",
        "digests",
    )

    def __init__(self, key: bytes, slots: np.ndarray, parent: TreeNode | None, end: int) -> None:
        self.key = key
        self.slots = slots
        self.parent = parent
        self.end = end
        self.children: dict[bytes, TreeNode] = {}
        self.state_slot = -1
        self.kv_lock = 0
        self.state_lock = 0
        self.kv_access = 0
        self.state_access = 0
        self.is_attached = True
        self.digests: list[bytes] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.slots)

    @property
    def start(self) -> int:
        return self.end - len(self.slots)

    def path(self) -> list[TreeNode]:
        """Nodes from below the root down to this one."""
        nodes: list[TreeNode] = []
        node: TreeNode = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def token_bytes(self) -> bytes:
        """Key of the whole path from the root to the end of this node."""
        return b"".join(node.key for node in self.path())
