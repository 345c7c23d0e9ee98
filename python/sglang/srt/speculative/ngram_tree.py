"""From earlier occurrences of a context to a tree of drafts."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from sglang.srt.speculative.ngram_index import Occurrence


@dataclass
class TokenTree:
    """Nodes in creation order, parents first; node 0 is the bonus, whose token is not stored here.

    ``tokens[i]``, ``parents[i]`` describe node i + 1.
    """

    max_nodes: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    _children: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def is_full(self) -> bool:
        return len(self.tokens) >= self.max_nodes

    def child(self, parent: int, token: int) -> int | None:
        """The node for ``token`` under ``parent``, made if there is room; None if there is none."""
        node = self._children.get((parent, token))
        if node is None and not self.is_full:
            self.tokens.append(token)
            self.parents.append(parent)
            node = self._children[parent, token] = len(self.tokens)
        return node


def breadth_of(length: int, *, max_depth: int, low: int, high: int) -> int:
    """Children per node after a match of ``length``: the surer the match, the narrower the tree."""
    if max_depth <= 1:
        return high
    share = (min(length, max_depth) - 1) / (max_depth - 1)
    return max(low, round(high - (high - low) * share))


def recent_tree(
    occurrences: Sequence[Occurrence], *, max_nodes: int, max_depth: int, low: int, high: int
) -> TokenTree:
    """Breadth first from the longest match down; at each node the most recent continuations win."""
    tree = TokenTree(max_nodes)
    for length in sorted({o.length for o in occurrences}, reverse=True):
        breadth = breadth_of(length, max_depth=max_depth, low=low, high=high)
        group = [o.following for o in occurrences if o.length >= length]
        frontier = [(0, group)]
        depth = 0
        while frontier and not tree.is_full:
            frontier = _expand(tree, frontier, depth, breadth)
            depth += 1
        if tree.is_full or high == 1:  # a second match would start a second branch
            break
    return tree


def _expand(
    tree: TokenTree, frontier: list[tuple[int, list[list[int]]]], depth: int, breadth: int
) -> list[tuple[int, list[list[int]]]]:
    """Add one level below ``frontier``; returns the new nodes with the texts that pass them."""
    level = []
    for node, texts in frontier:
        for token, passing in list(_by_token(texts, depth).items())[:breadth]:
            child = tree.child(node, token)
            if child is None:
                return level
            level.append((child, passing))
    return level


def frequent_tree(
    occurrences: Sequence[Occurrence], *, max_nodes: int, max_depth: int, low: int, high: int
) -> TokenTree:
    """Best first: a node's score is the product of its ancestors' shares among their siblings.

    Longer matches are exhausted before shorter ones are used; ``low`` and ``high`` bound the children
    of a node as in ``recent_tree``.
    """
    tree = TokenTree(max_nodes)
    for length in sorted({o.length for o in occurrences}, reverse=True):
        breadth = breadth_of(length, max_depth=max_depth, low=low, high=high)
        group = [o.following for o in occurrences if o.length >= length]
        heap: list[tuple[float, int, int, int, list[list[int]]]] = []
        _push_children(heap, 0, group, 0, 1.0, breadth)
        while heap and not tree.is_full:
            negative, _, token, parent_and_depth, texts = heapq.heappop(heap)
            parent, depth = divmod(parent_and_depth, 1 << 16)
            child = tree.child(parent, token)
            if child is not None:
                _push_children(heap, child, texts, depth + 1, -negative, breadth)
        if tree.is_full or high == 1:  # a second match would start a second branch
            break
    return tree


def _push_children(
    heap: list, parent: int, texts: list[list[int]], depth: int, score: float, breadth: int
) -> None:
    shares = _by_token(texts, depth)
    total = sum(len(passing) for passing in shares.values())
    best = sorted(shares.items(), key=lambda item: -len(item[1]))[:breadth]
    for order, (token, passing) in enumerate(best):
        key = (-score * len(passing) / total, len(heap) + order, token)
        heapq.heappush(heap, (*key, (parent << 16) + depth, passing))


def _by_token(texts: list[list[int]], depth: int) -> dict[int, list[list[int]]]:
    """Texts by their token at ``depth``, tokens in order of first appearance (the most recent)."""
    groups: dict[int, list[list[int]]] = {}
    for text in texts:
        if depth < len(text):
            groups.setdefault(text[depth], []).append(text)
    return groups
