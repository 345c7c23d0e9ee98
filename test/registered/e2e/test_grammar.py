"""Constrained decoding in every kind of step: prefill, plain decode, chains, trees, retraction.

Known faults F74 to F79.
"""

from __future__ import annotations

import json
import re
import sys

import pytest

from sglang.bundled import resolve_model_path
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.tokenizer import Tokenizer
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.engine_harness import InProcessEngine

register_cpu_ci(est_time=30, suite="e2e")

pytest.importorskip("llguidance", reason="needs the extra [grammar]")

CHAIN = {"speculative_algorithm": "NEXTN", "enable_linear_lossless_verify": True}
TREE = {
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 2,
    "speculative_num_draft_tokens": 6,
}
MODES = {
    "plain": {},
    "chain": CHAIN,
    "rejection": {**CHAIN, "speculative_use_rejection_sampling": True},
    "tree": TREE,
    "ngram": {"speculative_algorithm": "NGRAM"},
}
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "who": {"type": "string", "pattern": "^[A-Za-z ]{1,12}$"},
            "sea": {"type": "boolean"},
            "ships": {"type": "array", "items": {"enum": ["Pequod", "Dawn"]}, "maxItems": 3},
        },
        "required": ["who", "sea", "ships"],
        "additionalProperties": False,
    }
)
CONSTRAINTS = [
    {"json_schema": SCHEMA},
    {"regex": r"(yes|no), [a-z]{3,12}( [a-z]{2,9}){2}\."},
    {"ebnf": 'start: word ("," word){1,9} ";"\nword: /[a-z]{2,6}/'},
    {"ebnf": 'root ::= item item item\nitem ::= "- " [a-z]+ "\\n"'},
]
PROMPT = "The captain looked at the sea and"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(resolve_model_path("demo"))


@pytest.fixture(scope="module")
def engines():
    built = {}

    def get(mode):
        if mode not in built:
            built[mode] = InProcessEngine("demo", **MODES[mode])
        return built[mode]

    return get


def run_all(engine, tokenizer, **sampling):
    """Outputs of all constraints in one batch, beside a request without any."""
    ids = tokenizer.encode(PROMPT)
    base = {"max_new_tokens": 90, "stop_token_ids": [4064, 4066], **sampling}
    rids = [engine.submit(ids, **base, **constraint) for constraint in CONSTRAINTS]
    free = engine.submit(ids, **base | {"max_new_tokens": 12})
    engine.run()
    return [engine.ids(rid) for rid in (*rids, free)], [engine.last(rid) for rid in rids]


def check(texts):
    value = json.loads(texts[0])
    assert list(value) == ["who", "sea", "ships"] and isinstance(value["sea"], bool)
    assert re.fullmatch(CONSTRAINTS[1]["regex"], texts[1])
    assert re.fullmatch(r"[a-z]{2,6}(,[a-z]{2,6}){1,9};", texts[2])
    assert re.fullmatch(r"(- [a-z]+\n){3}", texts[3])


@pytest.mark.parametrize("mode", MODES)
def test_greedy_text_is_valid_and_the_same_in_every_mode(engines, tokenizer, mode):
    """F74, F75, F79: rows masked from the wrong state, or text after the grammar's last token."""
    want, _ = run_all(engines("plain"), tokenizer)
    got, last = run_all(engines(mode), tokenizer)
    assert got == want
    texts = [tokenizer.decode(ids) for ids in got]
    check(texts)
    assert [item.finish_reason.type for item in last] == ["stop"] * len(CONSTRAINTS)
    with pytest.raises((ValueError, AssertionError)):  # the control: free text fits no grammar
        check([texts[-1]] * 4)


@pytest.mark.parametrize("mode", ["plain", "chain", "rejection", "tree"])
def test_sampled_text_is_valid(engines, tokenizer, mode):
    """F74: a sampled token outside the grammar; matched drafts keep a seed's text."""
    for seed in range(2):
        options = {"temperature": 0.6, "sampling_seed": seed}
        got, _ = run_all(engines(mode), tokenizer, **options)
        check([tokenizer.decode(ids) for ids in got])
        if mode in ("chain", "tree"):
            assert got == run_all(engines("plain"), tokenizer, **options)[0]


@pytest.mark.parametrize("mode", ["plain", "chain"])
def test_the_end_wins_over_what_else_was_asked(engines, tokenizer, mode):
    """F79: a complete grammar ends the request with 'stop', whatever limit falls together with it."""
    engine, ids = engines(mode), tokenizer.encode(PROMPT)
    whole = tokenizer.encode("true", add_special_tokens=False)
    for options in (
        {"max_new_tokens": len(whole)},
        {"max_new_tokens": 40, "ignore_eos": True},
        {"max_new_tokens": 40, "min_new_tokens": 20, "stop_token_ids": [4064, 4066]},
    ):
        rid = engine.submit(ids, regex="true", **options)
        engine.run()
        assert tokenizer.decode(engine.ids(rid)) == "true"
        assert engine.last(rid).finish_reason.type == "stop"
    rid = engine.submit(ids, json_schema=SCHEMA, max_new_tokens=6)
    engine.run()
    assert engine.last(rid).finish_reason.type == "length"


@pytest.mark.parametrize("mode", ["plain", "chain"])
def test_retraction_keeps_the_grammar(engines, tokenizer, mode):
    """A matcher that begins again, or skips tokens, after its request went back to the queue."""
    engine = engines(mode)
    options = {"max_new_tokens": 100, "regex": r"([a-z]{1,9} ){9}the end"}
    ids = tokenizer.encode(PROMPT)
    (want,) = engines("plain").generate([ids], **options)
    rid = engine.submit(ids, **options)
    for _ in range(4):
        for _ in range(2):
            engine.scheduler.step()
        if engine.scheduler.running:
            engine.scheduler._retract(engine.scheduler.running[0], engine.scheduler.running)
    engine.run()
    assert engine.ids(rid) == want
    assert engine.scheduler.metrics.num_retracted >= 3
    assert re.fullmatch(options["regex"], tokenizer.decode(want))


@pytest.mark.parametrize("mode", ["plain", "chain", "tree"])
def test_a_grammar_begins_after_thinking(engines, tokenizer, mode):
    """F78: reasoning that the grammar constrains, or an answer that it does not."""

    def run(engine):
        params = SamplingParams(
            temperature=0.0,
            max_new_tokens=200,
            regex="[0-9]{3}",
            logit_bias={4068: 12.0},
            stop_token_ids=[4064, 4066],
        )
        params.normalize()
        message = TokenizedGenerateReqInput(
            rid="think",
            input_ids=tokenizer.encode("<think>\n" + PROMPT),
            sampling_params=params,
            grammar_after="</think>",
        )
        engine.outputs.pop("think", None)
        engine.scheduler.handle(message)
        engine.run()
        return tokenizer.decode(engine.ids("think"), skip_special_tokens=False)

    text = run(engines(mode))
    assert re.fullmatch(r"[^0-9]+</think>[0-9]{3}", text, re.DOTALL)
    assert text == run(engines("plain"))


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        ({"json_schema": '{"type": "nonsense"}'}, "json_schema: Invalid type: nonsense"),
        ({"json_schema": "{"}, "json_schema: "),
        ({"json_schema": '{"not": {}}'}, "Unimplemented keys"),
        ({"regex": "("}, "regex: "),
        ({"ebnf": "start: missing"}, 'unknown name: "missing"'),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_grammar_is_refused_by_name(engines, tokenizer, constraint, words):
    """F77: an answer that nothing constrains."""
    engine = engines("plain")
    rid = engine.submit(tokenizer.encode(PROMPT), max_new_tokens=4, **constraint)
    reason = engine.last(rid).finish_reason
    assert (reason.type, reason.status_code) == ("abort", 400)
    assert words in reason.message and reason.message.startswith(next(iter(constraint)))
    assert engine.scheduler.is_idle


def test_without_the_package_the_request_is_refused(engines, tokenizer, monkeypatch):
    """F77: an unconstrained answer on a server without llguidance."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    engine = engines("plain")
    rid = engine.submit(tokenizer.encode(PROMPT), max_new_tokens=4, regex="never seen")
    reason = engine.last(rid).finish_reason
    assert reason.status_code == 400 and "sglang-lossless[grammar]" in reason.message


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
