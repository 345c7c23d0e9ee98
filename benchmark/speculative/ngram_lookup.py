"""How long an NGRAM lookup takes, and how long its context takes to index.

    python -m benchmark.speculative.ngram_lookup --tokens 100000

Prints one line per context length: insertion of the whole prompt once, then the median and 99th
percentile of lookup plus tree, and of the insertion of four accepted tokens.
"""

from __future__ import annotations

import argparse
import random
import time

from sglang.srt.speculative.ngram_index import NgramIndex
from sglang.srt.speculative.ngram_tree import recent_tree

_VOCAB = 150_000
_WIDTH = 11


def text_like(num_tokens: int, seed: int) -> list[int]:
    """Token ids with a heavy-tailed vocabulary and repeated phrases."""
    rng = random.Random(seed)
    phrases = [
        [min(int(rng.paretovariate(0.7)), _VOCAB) for _ in range(rng.randint(3, 40))]
        for _ in range(2000)
    ]
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        tokens += rng.choice(phrases)
    return tokens[:num_tokens]


def measure(num_tokens: int, repeats: int) -> dict[str, float]:
    """Milliseconds by name for one context length."""
    tokens = text_like(num_tokens, seed=0)
    index = NgramIndex(capacity=10_000_000, max_depth=18)
    sequence = index.open_sequence()
    started = time.perf_counter()
    index.append(sequence, tokens)
    insert_s = time.perf_counter() - started
    lookups, appends = [], []
    for i in range(repeats):
        started = time.perf_counter()
        found = index.lookup(sequence, width=_WIDTH, limit=32)
        recent_tree(found, max_nodes=_WIDTH, max_depth=18, low=1, high=10)
        lookups.append(time.perf_counter() - started)
        place = (i * 977) % (num_tokens - 4)
        started = time.perf_counter()
        index.append(sequence, tokens[place : place + 4])
        appends.append(time.perf_counter() - started)
    lookups.sort()
    appends.sort()
    return {
        "insert_all_ms": insert_s * 1e3,
        "lookup_p50_ms": lookups[repeats // 2] * 1e3,
        "lookup_p99_ms": lookups[repeats * 99 // 100] * 1e3,
        "append4_p50_ms": appends[repeats // 2] * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--repeats", type=int, default=1000)
    options = parser.parse_args()
    for num_tokens in options.tokens:
        figures = measure(num_tokens, options.repeats)
        shown = "  ".join(f"{name} {value:.3f}" for name, value in figures.items())
        print(f"{num_tokens:>8} tokens  {shown}")


if __name__ == "__main__":
    main()
