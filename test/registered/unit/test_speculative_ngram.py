"""The n-gram index against brute force, and the shape of the trees made from it."""

from __future__ import annotations

import random
import time

import pytest

from sglang.srt.speculative.ngram_index import NgramIndex, Occurrence
from sglang.srt.speculative.ngram_tree import breadth_of, frequent_tree, recent_tree
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="unit")

DEPTH = 8


def brute_force(texts, own, width):
    """Longest match and its most recent end over all texts."""
    context = texts[own]
    best = None
    for number, text in enumerate(texts):
        for end in range(len(text) - 1):
            length = 0
            while (
                length < min(DEPTH, end + 1, len(context))
                and text[end - length] == context[-1 - length]
            ):
                length += 1
            if length and (best is None or length >= best[0]):
                best = (length, number, end)
    return best


@pytest.mark.parametrize("seed", range(4))
def test_longest_match_equals_brute_force(seed):
    """Inserted in pieces of all sizes, one by one and many at once."""
    rng = random.Random(seed)
    texts = [[rng.randrange(6) for _ in range(rng.randint(20, 120))] for _ in range(4)]
    index = NgramIndex(capacity=10_000, max_depth=DEPTH)
    own = len(texts) - 1
    for text in texts:
        sequence, start = index.open_sequence(), 0
        while start < len(text):
            step = rng.choice((1, 2, 3, 40))
            index.append(sequence, text[start : start + step])
            start += step
    found = index.lookup(own, width=5, limit=64)
    length, number, end = brute_force(texts, own, 5)
    assert found[0].length == length
    assert any(o.length == length for o in found)
    following = texts[number][end + 1 : end + 6]
    if number != own:
        assert following == found[0].following[: len(following)]
    assert all(o.following for o in found)
    assert [(-o.length, -o.entry) for o in found] == sorted((-o.length, -o.entry) for o in found)


def test_own_loop_is_continued_with_its_period():
    """``a b a b``: the text after the last ``a b`` is unwritten; the loop goes on."""
    index = NgramIndex(capacity=100, max_depth=DEPTH)
    sequence = index.open_sequence()
    index.append(sequence, [1, 2, 1, 2, 1, 2])
    assert index.lookup(sequence, width=5, limit=8)[0].following == [1, 2, 1, 2, 1]


def test_lookup_changes_nothing_and_empty_is_empty():
    index = NgramIndex(capacity=100, max_depth=DEPTH)
    sequence = index.open_sequence()
    assert index.lookup(sequence, width=3, limit=4) == []
    index.append(sequence, [5])
    assert index.lookup(sequence, width=3, limit=4) == []
    index.append(sequence, [6, 5])
    first = index.lookup(sequence, width=3, limit=4)
    assert first == index.lookup(sequence, width=3, limit=4) != []


def test_capacity_forgets_the_oldest_and_never_returns_it():
    index = NgramIndex(capacity=64, max_depth=DEPTH)
    old = index.open_sequence()
    index.append(old, [100, 101, 102, 103])
    for _ in range(10):
        index.append(index.open_sequence(), list(range(20)))
    assert index.length(old) == 0
    assert index.num_sequences <= 5
    fresh = index.open_sequence()
    index.append(fresh, [100, 101, 102])
    assert index.lookup(fresh, width=3, limit=8) == []
    index.append(index.open_sequence(), list(range(1000)))
    assert index.num_entries > 1000


def test_random_traffic_on_a_tiny_index_only_returns_true_occurrences():
    """Wrap-around, eviction and hash collisions never yield a continuation that was not there."""
    rng = random.Random(9)
    index = NgramIndex(capacity=50, max_depth=4)
    texts: dict[int, list[int]] = {}
    for _ in range(600):
        if not texts or rng.random() < 0.1:
            texts[index.open_sequence()] = []
        live = [n for n in texts if index.length(n) == len(texts[n])]
        sequence = rng.choice(live or [index.open_sequence()])
        text = texts.setdefault(sequence, [])
        new = [rng.randrange(4) for _ in range(rng.choice((1, 2, 20)))]
        if index.length(sequence) != len(text):
            continue
        index.append(sequence, new)
        text += new
        for o in index.lookup(sequence, width=3, limit=8):
            context = text[-o.length :]
            pieces = [t for n, t in texts.items() if index.length(n)]
            looped = [t + o.following for t in [text]]
            assert any(_occurs(t, context + o.following) for t in (*pieces, *looped))


def _occurs(text, part):
    return any(text[i : i + len(part)] == part for i in range(len(text) - len(part) + 1))


def occurrence(length, entry, following):
    return Occurrence(length=length, entry=entry, following=following)


def test_recent_tree_takes_newest_children_and_shares_prefixes():
    found = [occurrence(2, 9, [1, 2, 3]), occurrence(2, 7, [1, 4]), occurrence(2, 5, [6])]
    tree = recent_tree(found, max_nodes=5, max_depth=2, low=2, high=2)
    assert (tree.tokens, tree.parents) == ([1, 6, 2, 4, 3], [0, 0, 1, 1, 3])


def test_frequent_tree_prefers_what_happened_more_often():
    found = [occurrence(1, 9 - i, f) for i, f in enumerate([[1], [2, 5], [2, 5], [2, 6]])]
    tree = frequent_tree(found, max_nodes=4, max_depth=4, low=1, high=10)
    assert (tree.tokens, tree.parents) == ([2, 5, 1, 6], [0, 1, 0, 1])


@pytest.mark.parametrize("build", [recent_tree, frequent_tree])
def test_breadth_one_is_a_chain(build):
    found = [occurrence(3, 9, [1, 2]), occurrence(2, 8, [7, 8, 9]), occurrence(1, 5, [4])]
    tree = build(found, max_nodes=9, max_depth=4, low=1, high=1)
    assert tree.parents == list(range(len(tree.tokens)))
    assert tree.tokens == [1, 2]


def test_longer_matches_make_narrower_trees():
    widths = [breadth_of(n, max_depth=18, low=1, high=10) for n in range(1, 19)]
    assert widths[0] == 10 and widths[-1] == 1
    assert widths == sorted(widths, reverse=True)


def test_lookup_in_a_long_context_is_fast():
    """100,000 tokens of text-like repetition; median under 1 ms, tree included."""
    rng = random.Random(0)
    words = [[min(int(rng.paretovariate(0.7)), 50_000) for _ in range(30)] for _ in range(400)]
    tokens = [t for _ in range(3400) for t in rng.choice(words)][:100_000]
    index = NgramIndex(capacity=1_000_000, max_depth=18)
    sequence = index.open_sequence()
    index.append(sequence, tokens)
    times = []
    for i in range(101):
        index.append(sequence, [tokens[i * 37]])
        started = time.perf_counter()
        found = index.lookup(sequence, width=11, limit=32)
        recent_tree(found, max_nodes=11, max_depth=18, low=1, high=10)
        times.append(time.perf_counter() - started)
    assert sorted(times)[50] < 1e-3


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
