"""Finish rules inside an accepted block (known faults F57 to F62)."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.managers.finish import StopChecker
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_batch import SamplingState
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.accept import accept_matching_prefix
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="unit")

TEXT = ["a", "b", "\n", "é", "cd", "<end>"]


def decode(ids, skip_special_tokens):
    return "".join(TEXT[i] for i in ids if not (skip_special_tokens and i == 5))


def make_req(max_new_tokens=100, **stop_options) -> Req:
    params = SamplingParams()
    state = SamplingState(params, seed=0, vocab_size=6, stop_token_ids=frozenset())
    options = {"stop_token_ids": frozenset(), "decode": decode} | stop_options
    return Req("r", [0], state, StopChecker(**options), max_new_tokens)


@pytest.mark.parametrize("block", [1, 2, 3, 5])
def test_stop_token_ends_at_its_position(block):
    """Catches tokens returned after a stop in the middle of a block."""
    ids = [0, 1, 0, 5, 1, 1, 1]
    req = make_req(stop_token_ids=frozenset({5}))
    for start in range(0, len(ids), block):
        req.append(ids[start : start + block])
        if req.finish_reason:
            break
    assert req.output_ids == ids[:4]
    assert req.finish_reason.type == "stop" and req.finish_reason.matched == 5


@pytest.mark.parametrize("limit", range(1, 9))
def test_never_more_than_max_new_tokens(limit):
    req = make_req(max_new_tokens=limit)
    while req.finish_reason is None:
        req.append([0, 1, 0, 1])
    assert len(req.output_ids) == limit and req.finish_reason.type == "length"


def test_the_earlier_of_stop_and_length_wins():
    stop_first = make_req(max_new_tokens=4, stop_token_ids=frozenset({5}))
    stop_first.append([0, 5, 0, 0, 0])
    assert stop_first.finish_reason.type == "stop" and len(stop_first.output_ids) == 2
    length_first = make_req(max_new_tokens=2, stop_token_ids=frozenset({5}))
    length_first.append([0, 0, 5])
    assert length_first.finish_reason.type == "length" and len(length_first.output_ids) == 2


@pytest.mark.parametrize(
    ("stop", "ids", "kept"),
    [("\n", [0, 2, 0], 2), ("é", [3, 0], 1), ("bc", [0, 1, 4, 0], 3), ("d", [4, 0], 1)],
    ids=["newline", "non-ascii", "across tokens", "inside a token"],
)
def test_stop_strings_end_at_the_token_that_completes_them(stop, ids, kept):
    req = make_req(stop_strings=[stop])
    assert req.append(ids) == kept
    assert req.finish_reason.matched == stop


def test_stop_string_far_back_is_not_matched_again():
    """Catches a window that misses a match made of one-byte tokens."""
    req = make_req(stop_strings=["ab" * 20])
    req.append([0, 1] * 19)
    assert req.finish_reason is None
    req.append([0, 1])
    assert req.finish_reason.type == "stop"


@pytest.mark.parametrize("minimum", range(7))
def test_min_tokens_holds_inside_a_block(minimum):
    req = make_req(stop_token_ids=frozenset({5}), min_new_tokens=minimum)
    req.append([5] * 8)
    assert len(req.output_ids) == max(1, minimum)


def test_special_tokens_are_outside_the_text_unless_kept():
    hidden = make_req(stop_strings=["<end>"])
    hidden.append([5, 0])
    assert hidden.finish_reason is None
    shown = make_req(stop_strings=["<end>"], skip_special_tokens=False)
    assert shown.append([5, 0]) == 1


def test_stop_strings_without_a_tokenizer_are_refused():
    with pytest.raises(ValueError, match="stop_token_ids"):
        make_req(stop_strings=["x"], decode=None)


def test_acceptance_stops_at_the_first_difference():
    """Catches counting matches after a mismatch; every position is covered."""
    width = 5
    for position in range(width):
        candidates = torch.tensor([[9, 1, 2, 3, 4]])
        targets = torch.tensor([[1, 2, 3, 4, 7]])
        if position < width - 1:
            targets[0, position] = 8
        assert accept_matching_prefix(candidates, targets).tolist() == [position]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
