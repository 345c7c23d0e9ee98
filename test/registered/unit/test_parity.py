"""Comparisons, verdicts and reports of the parity tool, and its attach mode; no model runs.

Mistakes caught: a missing tail or a state digest that is not compared, a report that says "equal"
of nothing, of a server that does not repeat itself or of servers that verified nothing, and a
command line that swallows what it cannot do.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import torch

from sglang.parity.cli import main
from sglang.parity.client import Completion, OpenAIClient, ServerError, ServerFacts, _token_at
from sglang.parity.compare import compare, first_difference
from sglang.parity.report import (
    DIFFERENT,
    EQUAL,
    NOT_COMPARED,
    AlgorithmReport,
    overall,
    page,
    table,
)
from sglang.parity.runner import Job, run_pair, running
from sglang.parity.workloads import Outcome, Sizes
from sglang.srt.mem_cache.req_kv import ReqKV
from sglang.srt.mem_cache.state_digest import state_digest
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.front_end_case import FakeServer, write_front_end_model

register_cpu_ci(est_time=15, suite="unit")

TINY = Sizes(num_prompts=2, single_tokens=6, num_conversations=1, turn_tokens=12, follow_tokens=4)
JOB = Job(workloads=("single", "multi-turn", "batched"), sizes=TINY)


class StubClient:
    """Answers from a rule; ``change(number, completion)`` edits each answer."""

    url = "stub"

    def __init__(self, *, lossless, change=None, cached=8):
        self.lossless = lossless
        self.change = change
        self.cached = cached
        self.number = 0
        self.flushed = 0
        self.gaps = []

    def complete(self, prompt, max_tokens):
        ids = [(len(prompt) * 7 + i) % 50 for i in range(max_tokens)]
        answer = Completion(
            text="x" * max_tokens,
            output=ids,
            prompt_text=prompt,
            cached=self.cached,
            digest=f"{sum(ids)}",
            accept_length=2.0,
            num_verify=3,
        )
        if self.change is not None:
            self.change(self.number, answer)
        self.number += 1
        return answer

    def complete_batch(self, prompts, max_tokens):
        return [self.complete(prompt, max_tokens) for prompt in prompts]

    def follow(self, first, text, max_tokens):
        return self.complete(first.prompt_text + first.text + text, max_tokens)

    def count(self, prompt):
        return 4

    def flush(self):
        self.flushed += 1

    def gap(self, completion, position):
        self.gaps.append(position)
        return 0.25

    def facts(self):
        return ServerFacts(lossless=self.lossless, scratch_bytes=100, total_tokens=64)


ANSWERS_PER_RUN = 2 + 2 + 2


def stub_pair(job=JOB, left_change=None, right_change=None, **right):
    clients = {
        "default": StubClient(lossless=False, change=left_change),
        "lossless": StubClient(**({"lossless": True, "change": right_change} | right)),
    }
    opens = {name: running(lambda c=client: c) for name, client in clients.items()}
    return run_pair("NEXTN", opens, job), clients


@pytest.mark.parametrize("together", [False, True])
def test_a_server_that_cannot_start_ends_the_comparison_and_the_other(together):
    closed = []

    @contextmanager
    def left():
        try:
            yield StubClient(lossless=False)
        finally:
            closed.append("left")

    @contextmanager
    def right():
        raise ServerError("no room")
        yield

    with pytest.raises(ServerError, match="no room"):
        run_pair("NEXTN", {"default": left, "lossless": right}, replace(JOB, together=together))
    assert closed == ["left"]


def completion(output, digest=None):
    return Completion(text="", output=output, digest=digest)


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 9, 3], 1),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3], [1, 2], 2),
        ([], [], None),
    ],
    ids=["equal", "inside", "left-short", "right-short", "empty"],
)
def test_first_difference_counts_a_missing_tail(left, right, expected):
    assert first_difference(completion(left), completion(right)) == expected


def test_a_digest_counts_although_tokens_are_equal():
    left = Outcome([completion([1], "a"), completion([1], "b")], ["single", "single"])
    right = Outcome([completion([1], "a"), completion([1], "c")], ["single", "single"])
    (result,) = compare(left, right, None)
    assert (result.equal, result.total, result.compared_digests) == (1, 2, 2)
    (difference,) = result.differences
    assert (difference.index, difference.position) == (1, -1)
    assert "recurrent state differs" in difference.sentence()


def test_different_workloads_are_refused():
    with pytest.raises(ValueError, match="nothing to compare"):
        compare(Outcome([completion([1])], ["single"]), Outcome(), None)


@pytest.mark.parametrize("together", [False, True])
def test_everything_equal(together):
    report, clients = stub_pair(replace(JOB, together=together))
    assert report.verdict == EQUAL
    assert not list(report.sentences())
    assert [g.ratio for g in report.across.values()] == ["2/2", "1/1", "1/1", "2/2"]
    assert report.num_digests == report.num_comparisons == ANSWERS_PER_RUN
    assert all(c.flushed == 6 for c in clients.values()), "a flush before each workload and run"


def test_a_difference_names_place_and_gap():
    def change(number, answer):
        if number % ANSWERS_PER_RUN == 1:
            answer.output[3] = 49

    report, clients = stub_pair(right_change=change)
    assert report.verdict == DIFFERENT
    (difference,) = report.across["single"].differences
    assert (difference.index, difference.position, difference.right) == (1, 3, 49)
    assert difference.logit_gap == 0.25 and clients["lossless"].gaps == [3]
    assert "output 3" in table([report]) and "2.50e-01" in table([report])


def test_a_server_that_does_not_repeat_itself_is_no_proof():
    def change(number, answer):
        if number == ANSWERS_PER_RUN:
            answer.output[0] = 49

    report, _ = stub_pair(left_change=change)
    assert all(g.is_equal for g in report.across.values())
    assert report.verdict == DIFFERENT
    assert any("does not repeat itself" in s for s in report.sentences())


def no_verify(number, answer):
    answer.num_verify = 0


def no_digest(number, answer):
    answer.digest = None


def empty(number, answer):
    answer.output = []


@pytest.mark.parametrize(
    ("right", "why"),
    [
        ({"right_change": no_verify}, "no verify step ran"),
        ({"right_change": no_digest}, "did not tell a digest"),
        ({"lossless": False}, "lossless_verify False"),
        ({"cached": 0}, "did not resume"),
        ({"cached": None}, "not reported"),
    ],
    ids=["no-verify", "no-digest", "same-scratch", "cold", "cache-unknown"],
)
def test_equality_that_proves_nothing_is_not_equal(right, why):
    report, _ = stub_pair(**right)
    assert report.verdict == NOT_COMPARED
    assert any(why in sentence for sentence in report.sentences())


def test_empty_answers_and_empty_reports_are_not_equal():
    report, _ = stub_pair(left_change=empty, right_change=empty)
    assert report.verdict == NOT_COMPARED
    assert AlgorithmReport("NEXTN").verdict == NOT_COMPARED


def test_a_difference_outweighs_what_was_not_compared():
    def change(number, answer):
        answer.output[0] = 49

    different, _ = stub_pair(right_change=change)
    equal, _ = stub_pair()
    assert overall([AlgorithmReport("x"), different, equal]) == DIFFERENT
    assert overall([AlgorithmReport("x"), equal]) == NOT_COMPARED
    assert overall([equal]) == EQUAL


class _Cells(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open = []
        self.cells = 0

    def handle_starttag(self, tag, attrs):
        self.cells += tag in ("td", "th")
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_page_is_well_formed_and_escapes():
    def change(number, answer):
        answer.output, answer.text = list("<b>"), "<b>"

    report, _ = stub_pair(right_change=change)
    text = page([report], "sglang parity --model-path '<x>'")
    cells = _Cells()
    cells.feed(text)
    assert not cells.open and cells.cells == 7 + 3 * 7 + 4 + 2 * 4
    assert "<x>" not in text and "<b>" not in text and "NOT equal" in text


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "--model-path"),
        (["--model-path", "demo", "--workloads", "single,double"], "single,double"),
        (["--model-path", "demo", "--algorithms", ","], "--algorithms"),
        (["--model-path", "demo", "--algorithms", "NEXTN,FAST"], "--algorithms FAST: choose of"),
        (["--model-path", "demo", "--port", "1"], "--port"),
        (["--model-path", "demo", "--enable-linear-lossless-verify"], "one of the two"),
        (["--model-path", "demo", "--speculative-algorithm=NEXTN"], "--algorithms"),
        (["--model-path", "demo", "--draft-model-path", "DFLASH"], "ALGORITHM=PATH"),
        (["--attach", "http://a", "http://a/"], "same server"),
        (["--attach", "here", "http://a"], "--attach here: an address begins with"),
        (["--attach", "http://a", "http://b", "--page-size", "1"], "--page-size"),
        (["--attach", "http://a", "http://b", "--algorithms", "DFLASH"], "--algorithms: servers"),
        (["--attach", "http://a", "http://b", "--draft-model-path", "A=B"], "--draft-model-path: "),
        (["--model-path", "demo", "--protocol", "openai"], "--protocol openai: is of --attach"),
        (
            ["--model-path", "demo", "--draft-model-path", "DSPARK=x"],
            "not among --algorithms NEXTN",
        ),
        (["--model-path", "demo", "--json", "/no/such/folder/x.json"], "--json /no/such/folder"),
        (["--attach", "http://127.0.0.1:1", "http://127.0.0.1:2"], "is the server running"),
    ],
)
def test_bad_command_lines_end_with_2_and_a_sentence(words, named, capsys):
    assert main(words) == NOT_COMPARED
    assert named in capsys.readouterr().err


def test_a_dead_second_server_is_found_before_the_first_one_runs(servers, capsys):
    """Catches minutes of work on one server for a comparison that cannot be made."""
    left = servers[0]
    assert main(["--attach", left, "http://127.0.0.1:1"]) == NOT_COMPARED
    shown = capsys.readouterr().err
    assert "http://127.0.0.1:1: " in shown and "run 1" not in shown


def test_an_interrupted_run_ends_without_a_traceback(servers, monkeypatch, capsys):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("sglang.parity.cli.run_pair", interrupted)
    assert main(["--attach", *servers[:2]]) == 130
    assert capsys.readouterr().err == "sglang parity: interrupted\n"


def test_position_of_a_character_in_tokens():
    assert [_token_at([10, 13, 17], at) for at in (0, 2, 3, 9)] == [0, 0, 1, 2]
    assert _token_at([], 3) == -1


class StubPool:
    """Two layers, four slots."""

    def __init__(self):
        rows = torch.arange(2 * 4 * 6, dtype=torch.float32)
        self.mamba_cache = SimpleNamespace(
            conv=[rows.reshape(2, 4, 6).bfloat16()], temporal=rows.reshape(2, 4, 1, 2, 3).clone()
        )

    def get_cpu_copy(self, idx):
        cache = self.mamba_cache
        return [tensor[:, idx] for tensor in cache.conv], cache.temporal[:, idx]


TRACKED = ReqKV(
    mamba_pool_idx=1,
    mamba_ping_pong_track_buffer=[2, 3],
    mamba_last_track_idx=1,
    mamba_last_track_seqlen=64,
)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("tensor", ["conv", "temporal"])
@pytest.mark.parametrize(("slot", "counts"), [(0, False), (1, True), (2, False), (3, True)])
def test_digest_covers_working_and_latest_track_slot(layer, tensor, slot, counts):
    pool = StubPool()
    before = state_digest(pool, TRACKED)
    held = pool.mamba_cache
    target = held.conv[0] if tensor == "conv" else held.temporal
    bits = target.view(torch.int16 if tensor == "conv" else torch.int32)
    bits[layer, slot].view(-1)[-1] ^= 1
    assert (state_digest(pool, TRACKED) != before) is counts


def test_digest_knows_where_the_boundary_was_and_whether_there_is_one():
    pool = StubPool()
    moved = replace(TRACKED, mamba_last_track_seqlen=128)
    given_away = replace(TRACKED, mamba_last_track_idx=None, mamba_last_track_seqlen=None)
    digests = {state_digest(pool, kv) for kv in (TRACKED, moved, given_away)}
    assert len(digests) == 3 and None not in digests
    assert state_digest(pool, ReqKV()) is None


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Two servers with the same answers in other portions, and one with answers of its own."""
    model = write_front_end_model(tmp_path_factory.mktemp("model"))
    options = {"max_req_input_len": 2000}
    with (
        FakeServer(model, options=options | {"width": 3}) as left,
        FakeServer(model, options=options | {"width": 7}) as right,
        FakeServer(model, options=options | {"width": 7, "script": list(b"abc" * 300)}) as other,
    ):
        yield [server.wait_ready().url for server in (left, right, other)]


@pytest.mark.parametrize("protocol", ["native", "openai"])
def test_attached_servers(servers, protocol, tmp_path, capsys):
    left, right, other = servers
    report = tmp_path / "report.json"
    options = ["--short", "--protocol", protocol, "--json", str(report)]
    assert main(["--attach", left, right, *options]) == EQUAL
    assert json.loads(report.read_text())["verdict"] == "equal"
    assert main(["--attach", left, other, *options]) == DIFFERENT
    place = "output 0" if protocol == "native" else "character 0"
    assert f"first difference at {place}" in capsys.readouterr().out


def text_of(text, num_tokens=None):
    return Completion(text=text, output=list(text), num_tokens=num_tokens)


def one_group(left, right):
    (result,) = compare(Outcome([left], ["single"]), Outcome([right], ["single"]), None)
    return result


def test_text_counts_as_many_tokens_as_the_server_says(servers):
    """Catches characters that are called tokens."""
    counted = one_group(text_of("abcd", 2), text_of("abcd", 2))
    assert (counted.compared_tokens, counted.compared_chars) == (2, 0)
    unknown = one_group(text_of("abcd"), text_of("abcd"))
    assert (unknown.compared_tokens, unknown.compared_chars) == (0, 4)
    report = AlgorithmReport("attached", across={"single": unknown})
    for shown in (table([report]), page([report], "x")):
        assert "1 outputs, 0 tokens, 4 characters without a count of tokens" in shown
    answer = OpenAIClient(servers[0]).complete("éé", 8)
    assert (answer.text, answer.num_tokens) == ("éééé", 8)


def test_ids_and_text_are_compared_as_text():
    """Catches an id that "differs" from the letter which it stands for."""
    ids = Completion(text="ab", output=[97, 98])
    assert one_group(ids, text_of("ab")).is_equal
    (difference,) = one_group(text_of("ax"), ids).differences
    assert "first difference at character 1: 'x' against 'b'" in difference.sentence()


def test_openai_gap_comes_from_log_probabilities(servers):
    client = OpenAIClient(servers[0])
    answer = client.complete("some words", 8)
    gap = client.gap(answer, 2)
    assert gap is not None and gap >= 0


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
