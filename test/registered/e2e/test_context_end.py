"""The end of the context: every way to decode serves exactly --context-length tokens, and a request that
is refused or cut hears of the right limit."""

from __future__ import annotations

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.engine_harness import InProcessEngine

register_cpu_ci(est_time=30, suite="e2e")

CONTEXT = 150
"""No whole number of pages, so that a row's last page does not hide an overrun."""
PAGED = {"page_size": 16, "mamba_track_interval": 64}
AHEAD = {"device_steps": True, "disable_overlap_schedule": False}
HOST = {"device_steps": False}
TEXT = [(i * 37 + 11) % 3000 + 20 for i in range(CONTEXT + 1)]


def chain(width):
    return {"speculative_algorithm": "NEXTN", "speculative_num_steps": width - 1}


def block(algorithm):
    draft = f"demo-{algorithm.lower()}"
    return {"speculative_algorithm": algorithm, "speculative_draft_model_path": draft}


LOSSLESS = {"enable_linear_lossless_verify": True}
WAYS = {
    "plain-host": (HOST, 1),
    "plain-ahead": (AHEAD, 1),
    **{f"host-{d}": (HOST | chain(d), d) for d in (4, 8, 16)},
    **{f"ahead-{d}": (AHEAD | chain(d), d) for d in (4, 8, 16)},
    **{f"ahead-{d}-lossless": (AHEAD | chain(d) | LOSSLESS, d) for d in (4, 8, 16)},
    "host-16-lossless": (HOST | chain(16) | LOSSLESS, 16),
    "ngram": (HOST | {"speculative_algorithm": "NGRAM"}, 12),
    "dflash": (AHEAD | block("DFLASH") | LOSSLESS, 16),
    "dspark": (AHEAD | block("DSPARK"), 8),
}


@pytest.fixture(scope="module")
def endless():
    """What the model says after any prompt, in an engine whose context ends far behind."""
    engine, answers = InProcessEngine("demo", **HOST, **PAGED), {}

    def answer(prompt_len):
        if prompt_len not in answers:
            options = {"max_new_tokens": CONTEXT - prompt_len, "ignore_eos": True}
            (answers[prompt_len],) = engine.generate([TEXT[:prompt_len]], **options)
        return answers[prompt_len]

    return answer


@pytest.mark.parametrize("way", WAYS)
def test_every_token_of_the_context_is_served(way, endless):
    """Catches steps whose rows are taken from the context, and a last step that writes behind it."""
    options, width = WAYS[way]
    engine = InProcessEngine("demo", context_length=CONTEXT, **PAGED, **options)
    info = engine.built.info
    assert info["max_req_len"] == info["context_length"] == CONTEXT
    assert info["memory_plan"]["largest_request_tokens"] == CONTEXT
    edges = {
        CONTEXT - 1,
        CONTEXT - 2,
        *(CONTEXT - n * width + d for n in (1, 2) for d in (-1, 0, 1)),
    }
    lengths = sorted(n for n in edges if n < CONTEXT)
    for wanted in (10**6, None):
        rids = [engine.submit(TEXT[:n], max_new_tokens=wanted, ignore_eos=True) for n in lengths]
        engine.run()
        assert [engine.ids(rid) for rid in rids] == [endless(n) for n in lengths]
        assert {engine.last(rid).finish_reason.type for rid in rids} == {"length"}
    engine.scheduler.check_integrity()


@pytest.mark.parametrize("way", ["plain-host", "ahead-16-lossless"])
@pytest.mark.parametrize("count", [CONTEXT, CONTEXT + 1])
def test_a_prompt_that_fills_the_context_hears_of_it(way, count):
    """Catches a refusal that blames the KV cache, which has room."""
    engine = InProcessEngine("demo", context_length=CONTEXT, **PAGED, **WAYS[way][0])
    rid = engine.submit(TEXT[:count], max_new_tokens=1)
    engine.run()
    reason = engine.last(rid).finish_reason
    assert (reason.type, reason.status_code) == ("abort", 400)
    for text in (f"{count} tokens", f"--context-length {CONTEXT}", f"has {CONTEXT - 1}"):
        assert text in reason.message
    assert "KV cache" not in reason.message


@pytest.mark.parametrize("way", ["plain-host", "ahead-4", "ahead-16-lossless"])
def test_a_prompt_that_fills_the_pool_hears_of_it(way):
    """Catches a refusal that blames the context, which has room; rows of one step stay free."""
    options, width = WAYS[way]
    engine = InProcessEngine("demo", max_total_tokens=160, **PAGED, **options)
    most = 160 - width
    assert engine.built.info["max_req_len"] == most
    (ids,) = engine.generate([TEXT[:100]], max_new_tokens=10**6, ignore_eos=True)
    assert len(ids) == most - 100
    rid = engine.submit([5] * most, max_new_tokens=1)
    engine.run()
    message = engine.last(rid).finish_reason.message
    for text in (f"{most} tokens", "KV cache", f"has {most - 1}", "--max-total-tokens"):
        assert text in message


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
