"""Masks of one request, bit by bit, and what happens when a grammar cannot go on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang.bundled import resolve_model_path
from sglang.srt.constrained.bitmask import forbid
from sglang.srt.constrained.compiler import MAX_CACHED_GRAMMARS, GrammarCompiler
from sglang.srt.constrained.format_or_calls import format_or_calls
from sglang.srt.managers.finish import StopChecker
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.tokenizer import Tokenizer
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="unit")

pytest.importorskip("llguidance", reason="needs the extra [grammar]")

VOCAB = 4099
"""Not a multiple of 32, and more than the tokenizer has, as padded embeddings are."""
END_IDS = [4064, 4066]
SEQUENCE = r"(ab|ba|cat){2}[0-9]+"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(resolve_model_path("demo"))


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GrammarCompiler(tokenizer, vocab_size=VOCAB, end_ids=[*END_IDS, 4095])


def allowed(mask: np.ndarray) -> list[set[int]]:
    """Ids with a bit, of each row, as `forbid` leaves them."""
    logits = torch.zeros(mask.shape[0], VOCAB)
    forbid(logits, mask)
    return [set(torch.nonzero(torch.isfinite(row)).flatten().tolist()) for row in logits]


def test_rows_of_a_chain_equal_stepping(compiler, tokenizer):
    """Catches rows masked from the state of another row, and drafts that move the state (F75)."""
    tokens = [tokenizer.encode(text)[0] for text in ("c", "a", "t", "b", "a", "4")]
    state = compiler.compile("regex", SEQUENCE)
    together = allowed(state.mask_chain(tokens))
    assert together == allowed(state.mask_chain(tokens))
    for row, token in enumerate([*tokens, None]):
        assert allowed(state.mask_chain(()))[0] == together[row]
        if token is not None:
            assert token in together[row] and not state.advance(token)
    assert set(END_IDS) <= together[-1] and not set(END_IDS) & together[0]
    assert together[0] != together[1]


def test_rows_behind_a_wrong_draft_are_open(compiler, tokenizer):
    """Catches an all-forbidden row, which makes NaN of its probabilities."""
    good, bad = tokenizer.encode("c")[0], tokenizer.encode("7")[0]
    rows = allowed(compiler.compile("regex", SEQUENCE).mask_chain([good, bad, good]))
    assert good in rows[0] and bad not in rows[1]
    assert rows[2] == rows[3] == set(range(VOCAB))


def test_nodes_of_a_tree_follow_their_own_path(compiler, tokenizer):
    """Catches siblings that see one another (F76)."""
    c, a, b = (tokenizer.encode(text)[0] for text in "cab")
    state = compiler.compile("regex", SEQUENCE)
    rows = allowed(state.mask_tree([[], [c], [a], [c, a], [a, b]]))
    for path, row in zip([[], [c], [a], [c, a], [a, b]], rows, strict=True):
        assert allowed(state.mask_chain(path))[-1] == row
    assert rows[1] != rows[2]


def test_before_its_tag_a_grammar_forbids_the_end_alone(compiler, tokenizer):
    """Catches a tag that is cut over tokens, one inside a block of drafts, and an answer that ends
    while it thinks (F78)."""
    tag = tokenizer.encode("</think>")
    pieces = [tokenizer.encode(text)[0] for text in ("<", "/", "t")]
    word = tokenizer.encode("x")[0]
    for before in ([word], pieces + [word]):
        state = compiler.compile("regex", "[0-9]{2}", start_after="</think>")
        for token in before:
            assert not state.advance(token)
        rows = allowed(state.mask_chain([word, *tag, word]))
        free = set(range(VOCAB)) - set(END_IDS)
        assert rows[: len(tag) + 1] == [free] * (len(tag) + 1)
        assert (
            rows[len(tag) + 1] == allowed(compiler.compile("regex", "[0-9]{2}").mask_chain(()))[0]
        )
    state = compiler.compile("regex", "[0-9]{2}", start_after="ab")
    for text in "xab":
        state.advance(tokenizer.encode(text)[0])
    assert word not in allowed(state.mask_chain(()))[0]


def test_grammar_wins_over_minimum_length(compiler):
    """Catches a row without any token when both forbid what the other allows."""
    mask = compiler.compile("regex", "").mask_chain(())
    logits = torch.zeros(1, VOCAB)
    logits[0, END_IDS] = float("-inf")
    forbid(logits, mask)
    assert int(logits.argmax()) in END_IDS and int(torch.isfinite(logits).sum()) == len(END_IDS)


def test_a_token_against_the_grammar_ends_the_request_without_it(compiler, tokenizer):
    """Catches an answer that goes on unconstrained after a fault (F77)."""
    req = Req(
        rid="r",
        origin_input_ids=[1],
        sampling=None,
        stop=StopChecker(stop_token_ids=frozenset()),
        max_new_tokens=9,
        grammar=compiler.compile("regex", "[0-9]+"),
    )
    digit, letter = tokenizer.encode("7")[0], tokenizer.encode("x")[0]
    assert req.append([digit, letter, digit]) == 1
    assert req.output_ids == [digit]
    assert (req.finish_reason.type, req.finish_reason.status_code) == ("abort", 400)
    assert req.finish_reason.message.startswith("regex: ")


def test_requests_share_the_compiled_grammar_and_nothing_else(compiler, tokenizer):
    """Catches a matcher that two requests move, and a cache without an end."""
    first = compiler.compile("regex", "ab?c?d?")
    second = compiler.compile("regex", "ab?c?d?")
    start = allowed(second.mask_chain(()))
    first.advance(tokenizer.encode("a")[0])
    assert allowed(second.mask_chain(())) == start != allowed(first.mask_chain(()))
    for number in range(MAX_CACHED_GRAMMARS + 5):
        compiler.compile("regex", f"a{{{number + 1}}}")
    assert len(compiler._cache) == MAX_CACHED_GRAMMARS


@pytest.mark.parametrize("single", [False, True])
def test_a_format_beside_calls_allows_either_and_nothing_else(compiler, tokenizer, single):
    """Catches text around calls, a second call where one is allowed, blanks without an end in JSON."""
    schema = {"type": "object", "properties": {"d": {"type": "integer"}}, "required": ["d"]}
    grammar = format_or_calls(schema, tags=("<tool_call>", "</tool_call>"), single=single)

    def reads(text: str) -> tuple[bool, bool]:
        """Whether every token was allowed, and whether the text may end behind the last."""
        state = compiler.compile("ebnf", grammar)
        for token in tokenizer.encode(text):
            if token not in allowed(state.mask_chain(()))[0]:
                return False, False
            state.advance(token)
        return True, bool(set(END_IDS) & allowed(state.mask_chain(()))[0])

    call = '<tool_call>\n<function=a>\n{"x"\n</function>\n</tool_call>'
    assert reads('{"d": 5}') == reads(call) == (True, True)
    assert reads(f"{call}\n{call}") == ((False, False) if single else (True, True))
    assert reads("<tool_call>text") == (True, False)
    for bad in ("text", f"text{call}", f"{call}text", '{"d":  5}', call + '{"d": 5}'):
        assert not reads(bad)[0], bad


def test_refusals_name_the_option_and_the_way_out(tokenizer):
    for own, words in (
        (GrammarCompiler(None, vocab_size=VOCAB, end_ids=[]), "tokenizer"),
        (GrammarCompiler(tokenizer, vocab_size=VOCAB, end_ids=[], refusal="because"), "because"),
        (GrammarCompiler(tokenizer, vocab_size=VOCAB, end_ids=[4095]), "end token"),
    ):
        with pytest.raises(ValueError, match=f"^ebnf: .*{words}"):
            own.compile("ebnf", "start: /a/")


@pytest.mark.parametrize(
    "text",
    [
        "root ::= foo",
        'x ::= "a"',
        "::=",
        'root ::= "\\',
        "root ::= " + "(" * 3000 + '"a"' + ")" * 3000,
    ],
    ids=["undefined rule", "no root", "no name", "open escape", "deep"],
)
def test_gbnf_that_cannot_be_read_is_refused(compiler, text):
    """Catches an error of the converter that ends the scheduler: its errors are no ValueError."""
    with pytest.raises(ValueError, match="^ebnf: the GBNF grammar cannot be read"):
        compiler.compile("ebnf", text)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
