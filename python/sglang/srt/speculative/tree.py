"""Draft trees: shape, what a verify needs of it, and the walk that finds the accepted path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang.srt.layers.attention.linear.gdn_tree import tree_levels
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, LogitsOutput
from sglang.srt.utils.upload import upload_ids

NO_PARENT = -1


@dataclass(frozen=True)
class DraftTree:
    """One tree of D nodes per request; node 0 is the bonus.

    ``parents[r][i]`` is an earlier node of request r, or -1 for node 0 and for padding, which hangs on
    nothing and is never accepted.
    """

    parents: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        for r, own in enumerate(self.parents):
            for i, parent in enumerate(own):
                if not (NO_PARENT <= parent < i or i == 0 and parent == NO_PARENT):
                    raise ValueError(
                        f"node {i} of request {r} has parent {parent}; parents come before children"
                    )

    @property
    def num_nodes(self) -> int:
        return len(self.parents[0])

    def depths(self) -> list[list[int]]:
        """Distance of each node from the bonus; padding has depth 0."""
        table = []
        for own in self.parents:
            depth = [0] * len(own)
            for i, parent in enumerate(own):
                if parent != NO_PARENT:
                    depth[i] = depth[parent] + 1
            table.append(depth)
        return table

    def ancestors(self) -> Tensor:
        """[R, D, D] bool: entry (i, j) says that j is i or an ancestor of i."""
        num_nodes = self.num_nodes
        mask = torch.zeros((len(self.parents), num_nodes, num_nodes), dtype=torch.bool)
        for r, own in enumerate(self.parents):
            for i, parent in enumerate(own):
                if parent != NO_PARENT:
                    mask[r, i] = mask[r, parent]
                mask[r, i, i] = True
        return mask

    def links(self) -> tuple[Tensor, Tensor]:
        """First child and next sibling of every node, [R, D] int64 each, -1 for none.

        Children are linked in index order.
        """
        shape = (len(self.parents), self.num_nodes)
        first = torch.full(shape, -1, dtype=torch.int64)
        sibling = torch.full(shape, -1, dtype=torch.int64)
        for r, own in enumerate(self.parents):
            youngest: dict[int, int] = {}
            for i, parent in enumerate(own):
                if parent == NO_PARENT:
                    continue
                if parent in youngest:
                    sibling[r, youngest[parent]] = i
                else:
                    first[r, parent] = i
                youngest[parent] = i
        return first, sibling

    def path_to(self, request: int, node: int) -> list[int]:
        """Nodes from the bonus to ``node``, both included."""
        path = [node]
        while self.parents[request][path[-1]] != NO_PARENT:
            path.append(self.parents[request][path[-1]])
        return path[::-1]


def place_tree(fb: ForwardBatch, tree: DraftTree) -> None:
    """Turn a verify batch of chains into one of trees, in place.

    KV slots stay in node order; positions follow depth; parents and ancestor mask are set.
    """
    device = fb.positions.device
    depths = upload_ids(tree.depths(), device)
    fb.positions = (fb.prefix_lens.unsqueeze(1) + depths).reshape(-1)
    fb.tree_parents = upload_ids(tree.parents, device)
    fb.tree_mask = tree.ancestors().to(device)
    fb.tree_levels = tree_levels(tree.parents, device)


def walk(
    tree: DraftTree, tokens: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Accepted path of every request, the bonus node first.

    ``tokens[r][i]`` is the token of node i, ``targets[r][i]`` the target's choice after it.
    """
    paths = []
    for own_parents, own_tokens, own_targets in zip(tree.parents, tokens, targets, strict=True):
        children: dict[tuple[int, int], int] = {}
        for i, parent in enumerate(own_parents):
            if parent != NO_PARENT:
                children.setdefault((parent, own_tokens[i]), i)
        node, path = 0, [0]
        while (following := children.get((node, own_targets[node]))) is not None:
            node = following
            path.append(node)
        paths.append(path)
    return paths


def flat_rows(paths: Sequence[Sequence[int]], num_nodes: int) -> list[int]:
    """[R * D] row numbers that put each request's path first and its other nodes after it."""
    order = []
    for r, path in enumerate(paths):
        on_path = set(path)
        rest = [i for i in range(num_nodes) if i not in on_path]
        order += [r * num_nodes + i for i in (*path, *rest)]
    return order


def compact_output(output: LogitsOutput, order: Tensor) -> LogitsOutput:
    """The same output with its rows in ``order`` [R * D]."""
    return LogitsOutput(
        scores=output.scores[order],
        hidden=None if output.hidden is None else output.hidden[order],
        taps=None if output.taps is None else output.taps[order],
    )


def kv_moves(
    slots: Tensor, paths: Sequence[Sequence[int]], num_nodes: int
) -> tuple[Tensor, Tensor] | None:
    """Source and destination slots that bring each path's KV to the front, or None.

    slots [R * D]: the KV slot of every node, requests one after the other.
    """
    pairs = [
        (r * num_nodes + node, r * num_nodes + place)
        for r, path in enumerate(paths)
        for place, node in enumerate(path)
        if node != place
    ]
    if not pairs:
        return None
    index = upload_ids(pairs, slots.device)
    return slots[index[:, 0]], slots[index[:, 1]]
