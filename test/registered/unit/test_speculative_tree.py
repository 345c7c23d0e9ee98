"""Draft trees: shape, links, walk, moves, and the two CPU verify parts against plain chains.

Known fault F12: every node continues from its own parent's state.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from sglang.kernels.ops.cpu import gdn_torch
from sglang.srt.layers.attention.linear.gdn_tree import TreeScratch, record_trees, tree_levels
from sglang.srt.layers.attention.tree_attention import attend_trees
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.speculative.tree import DraftTree, flat_rows, kv_moves, walk
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="unit")

CPU = torch.device("cpu")
PARENTS = (-1, 0, 0, 1, 1, 2, 5)
TREE = DraftTree(parents=(PARENTS, (-1, 0, 1, 2, 3, -1, -1)))


def test_links_depths_and_ancestors():
    assert TREE.depths() == [[0, 1, 1, 2, 2, 2, 3], [0, 1, 2, 3, 4, 0, 0]]
    first, sibling = TREE.links()
    assert first[0].tolist() == [1, 3, 5, -1, -1, 6, -1]
    assert sibling[0].tolist() == [-1, 2, -1, 4, -1, -1, -1]
    mask = TREE.ancestors()
    assert torch.nonzero(mask[0, 6]).flatten().tolist() == [0, 2, 5, 6]
    assert torch.nonzero(mask[1, 5]).flatten().tolist() == [5], "padding sees itself alone"
    assert TREE.path_to(0, 6) == [0, 2, 5, 6]


@pytest.mark.parametrize("parents", [(-1, 1), (-1, 2, 0), (-1, -2), (0, 0)])
def test_impossible_parents_are_refused(parents):
    with pytest.raises(ValueError, match="parents come before children"):
        DraftTree(parents=(parents,))


def test_walk_stops_at_the_first_disagreement():
    tokens = [[9, 1, 2, 3, 4, 5, 6], [9, 1, 2, 3, 4, 0, 0]]
    targets = [[2, 7, 5, 7, 7, 8, 7], [1, 2, 3, 4, 0, 0, 0]]
    assert walk(TREE, tokens, targets) == [[0, 2, 5], [0, 1, 2, 3, 4]]
    assert walk(TREE, tokens, [[0] * 7, [0] * 7]) == [[0], [0]], "padding is never accepted"


def test_rows_and_kv_of_a_path_come_first():
    paths = [[0, 2, 5], [0, 1]]
    assert flat_rows(paths, 7)[:7] == [0, 2, 5, 1, 3, 4, 6]
    assert flat_rows(paths, 7)[7:9] == [7, 8]
    slots = torch.arange(100, 114)
    source, destination = kv_moves(slots, paths, 7)
    assert source.tolist() == [102, 105] and destination.tolist() == [101, 102]
    assert kv_moves(slots, [[0], [0, 1]], 7) is None


def make_layer(seed=0):
    generator = torch.Generator().manual_seed(seed)
    layer = RadixLinearAttention(
        layer_id=0,
        num_k_heads=2,
        num_v_heads=4,
        head_k_dim=8,
        head_v_dim=8,
        conv_kernel_size=4,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    layer.conv_weights.copy_(torch.randn(layer.conv_weights.shape, generator=generator))
    layer.A_log.copy_(torch.rand(4, generator=generator))
    layer.dt_bias.copy_(-torch.rand(4, generator=generator))
    return layer, generator


def random_case(parents, seed=0):
    layer, generator = make_layer(seed)
    num_requests, width = len(parents), len(parents[0])
    rows = num_requests * width
    scratch = TreeScratch(
        temporal=torch.randn((5, 4, 8, 8), generator=generator),
        conv=torch.randn((5, layer.conv_dim, 3), generator=generator),
        states=torch.full((6, 9, 4, 8, 8), float("nan")),
        windows=torch.full((6, 9, layer.conv_dim, 3), float("nan")),
    )
    inputs = (
        torch.randn((rows, layer.conv_dim), generator=generator),
        torch.randn((rows, 4), generator=generator),
        torch.randn((rows, 4), generator=generator),
    )
    return layer, scratch, inputs


def chain_states(layer, scratch, slot, x, a, b):
    """States, windows and outputs of a chain, by the one-request routine."""
    g, beta = gdn_torch.gates(a, b, layer.A_log, layer.dt_bias)
    conv_out, inputs = gdn_torch.conv_rows(x, scratch.conv[slot], layer.conv_weights)
    q, k, v = gdn_torch.split_heads(
        conv_out, num_k_heads=2, head_k_dim=8, num_v_heads=4, head_v_dim=8
    )
    parts, state, outputs = gdn_torch.GDNInputs(q, k, v, g, beta), scratch.temporal[slot], []
    for t in range(len(x)):
        state, _, out = gdn_torch.step(state, parts, t)
        outputs.append(out)
    return state, inputs[:, len(x) : len(x) + 3], outputs[-1]


def test_every_node_equals_the_chain_of_its_ancestors():
    """State, conv window and output of each node; the pool is left alone, unused rows too."""
    layer, scratch, (x, a, b) = random_case(TREE.parents)
    pool = scratch.temporal.clone(), scratch.conv.clone()
    slots, rows = torch.tensor([3, 1], dtype=torch.int32), torch.tensor([4, 2])
    out = record_trees(
        x, a, b, layer, scratch,
        slots=slots, scratch_rows=rows, levels=tree_levels(TREE.parents, CPU),
    )  # fmt: skip
    for request in range(2):
        for node in range(7):
            path = [request * 7 + n for n in TREE.path_to(request, node)]
            state, window, wanted = chain_states(
                layer, scratch, int(slots[request]), x[path], a[path], b[path]
            )
            row = int(rows[request])
            torch.testing.assert_close(scratch.states[row, node], state)
            torch.testing.assert_close(scratch.windows[row, node], window)
            torch.testing.assert_close(out[request * 7 + node], wanted)
    assert torch.equal(pool[0], scratch.temporal) and torch.equal(pool[1], scratch.conv)
    assert scratch.states[[0, 1, 3, 5]].isnan().all() and scratch.states[:, 7:].isnan().all()


def test_wrong_parent_would_be_noticed():
    """Control: another shape over the same rows gives other states."""
    layer, scratch, (x, a, b) = random_case(TREE.parents)
    slots, rows = torch.tensor([3, 1]), torch.tensor([4, 2])

    def run(parents):
        return record_trees(
            x, a, b, layer, scratch,
            slots=slots, scratch_rows=rows, levels=tree_levels(parents, CPU),
        )  # fmt: skip

    chain = run(((-1, 0, 1, 2, 3, 4, 5), TREE.parents[1]))
    assert not torch.allclose(run(TREE.parents)[6], chain[6])


def test_skipped_request_and_invalid_parents_touch_nothing_else():
    """F12: own, later and negative parents start from the pool; a negative slot is skipped."""
    layer, scratch, (x, a, b) = random_case(((0, 1), (0, 1), (0, 1)))
    out = record_trees(
        x, a, b, layer, scratch,
        slots=torch.tensor([2, -1, 4]),
        scratch_rows=torch.tensor([0, 1, 2]),
        levels=tree_levels([[5, 1], [-1, 0], [-7, -1]], CPU),
    )  # fmt: skip
    assert torch.equal(out[2:4], torch.zeros_like(out[2:4]))
    assert scratch.states[1].isnan().all() and not scratch.states[[0, 2], :2].isnan().any()
    state, _, _ = chain_states(layer, scratch, 2, x[1:2], a[1:2], b[1:2])
    torch.testing.assert_close(scratch.states[0, 1], state)
    rows = [[t.tolist() for t in level[1:]] for level in tree_levels([[0, 2, 0]], CPU)]
    assert rows == [[[0, 1], [0, 1]], [[2], [0]]]


def test_tree_attention_equals_the_chain_of_ancestors():
    rng = random.Random(1)
    generator = torch.Generator().manual_seed(1)
    layer = RadixAttention(
        layer_id=0, kv_layer=0, num_heads=4, num_kv_heads=2, head_dim=8, scaling=8**-0.5
    )
    prefixes, width = [5, 0], 7
    slots = rng.sample(range(1, 60), sum(prefixes) + 2 * width)
    table = torch.zeros((3, 20), dtype=torch.int32)
    table[2, :5] = torch.tensor(slots[:5])
    out_slots = torch.tensor(slots[5:])
    keys = torch.randn((60, 2, 8), generator=generator)
    values = torch.randn((60, 2, 8), generator=generator)
    q = torch.randn((2 * width, 4, 8), generator=generator)
    fb = SimpleNamespace(
        tree_mask=TREE.ancestors(),
        req_pool_indices=torch.tensor([2, 1]),
        prefix_lens_cpu=prefixes,
        out_cache_loc=out_slots,
    )
    out = attend_trees(q, keys, values, table, layer, fb)
    for request, prefix in enumerate(prefixes):
        for node in range(width):
            seen = table[2, :prefix].long().tolist() + [
                int(out_slots[request * width + n]) for n in TREE.path_to(request, node)
            ]
            k, v = (t[seen].repeat_interleave(2, dim=1) for t in (keys, values))
            scores = torch.einsum("hd,thd->ht", q[request * width + node], k) * layer.scaling
            wanted = torch.einsum("ht,thd->hd", scores.softmax(-1), v)
            torch.testing.assert_close(out[request * width + node], wanted)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
