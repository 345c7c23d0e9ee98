"""Constraints are compiled beside the scheduler's loop, and the vocabulary's table before it begins."""

from __future__ import annotations

import threading
import time

import pytest

from sglang.srt.arg_groups.pipeline import run_resolution_pipeline
from sglang.srt.constrained import compiler as compiler_module
from sglang.srt.constrained.compiler import GrammarCompiler
from sglang.srt.managers import scheduler_process
from sglang.srt.managers.intake import Intake
from sglang.srt.managers.io_struct import (
    AbortReq,
    ReadyOutput,
    ShutdownReq,
    TokenizedGenerateReqInput,
    encode_message,
)
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.engine_harness import InProcessEngine

register_cpu_ci(est_time=12, suite="unit")

pytest.importorskip("llguidance", reason="needs the extra [grammar]")

COMPILE_S = 0.8
PROMPT = list(range(30, 60))
DIGITS = r"[0-9]{6}"


@pytest.fixture
def engine():
    made = InProcessEngine("demo")
    made.built.grammars.prepare()
    return made


@pytest.fixture
def intake(engine):
    return make_intake(engine)


@pytest.fixture
def slow(monkeypatch):
    """Compiling takes COMPILE_S without the interpreter's lock, as llguidance does; counts the calls."""
    original, texts = GrammarCompiler._new_matcher, []

    def new_matcher(self, kind, text):
        texts.append(text)
        time.sleep(COMPILE_S)
        return original(self, kind, text)

    monkeypatch.setattr(GrammarCompiler, "_new_matcher", new_matcher)
    return texts


def make_intake(engine, max_held=None):
    return Intake(engine.scheduler, engine.built.grammars, max_held=max_held, send=engine._receive)


def request(rid, regex=None, num_new=12):
    params = SamplingParams(max_new_tokens=num_new, temperature=0.0, regex=regex, ignore_eos=True)
    params.normalize()
    return TokenizedGenerateReqInput(rid=rid, input_ids=PROMPT, sampling_params=params)


def serve(engine, intake, while_true):
    """Run the process's loop; return the longest time between two steps."""
    longest, last = 0.0, time.monotonic()
    while while_true():
        intake.hand_over()
        engine.scheduler.step()
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    return longest


def test_running_requests_do_not_notice_a_slow_constraint(engine, intake, slow):
    """A scheduler that compiles by itself stands still for as long as that takes."""
    alone = engine.generate([PROMPT], max_new_tokens=400, ignore_eos=True)[0]
    intake.handle(request("plain", num_new=400))
    for _ in range(5):
        engine.scheduler.step()
    intake.handle(request("digits", DIGITS))
    assert intake.is_waiting and "digits" not in engine.outputs
    busy = lambda: intake.is_waiting or not engine.scheduler.is_idle  # noqa: E731
    longest = serve(engine, intake, busy)
    print(f"longest step {longest:.3f} s while a constraint took {COMPILE_S} s")
    assert longest < COMPILE_S / 3
    assert engine.ids("plain") == alone
    assert len(engine.ids("digits")) >= 1 and slow == [DIGITS]
    assert engine.last("digits").finish_reason.type == "stop"
    # The control: handled by the scheduler itself, a new constraint does stop the loop.
    started = time.monotonic()
    engine.scheduler.handle(request("other", "[a-z]{4}"))
    assert time.monotonic() - started >= COMPILE_S


def test_known_constraints_do_not_wait(engine, intake, slow):
    """Also bad ones: a client that repeats a mistake must not pay, or cost, a compilation each time."""
    for rid, regex in (("a", DIGITS), ("b", "(["), ("c", DIGITS), ("d", "([")):
        intake.handle(request(rid, regex))
        assert intake.is_waiting == (rid in "ab")
        serve(engine, intake, lambda: intake.is_waiting or not engine.scheduler.is_idle)
    assert slow == [DIGITS, "(["]
    assert engine.ids("a") == engine.ids("c")
    first, again = (engine.last(rid).finish_reason for rid in "bd")
    assert first == again and first.status_code == 400 and first.message.startswith("regex: ")


def test_equal_constraints_that_wait_together_are_compiled_once(engine, intake, slow):
    for rid in "abc":
        intake.handle(request(rid, DIGITS))
    intake.handle(request("plain"))
    serve(engine, intake, lambda: intake.is_waiting or not engine.scheduler.is_idle)
    assert slow == [DIGITS]
    assert engine.ids("a") == engine.ids("b") == engine.ids("c")


@pytest.mark.parametrize("everything", [False, True])
def test_a_waiting_request_can_be_aborted(everything, engine, intake, slow):
    intake.handle(request("gone", DIGITS))
    intake.handle(AbortReq(rid="" if everything else "gone", abort_all=everything))
    assert not intake.is_waiting
    assert engine.last("gone").finish_reason.status_code == 499
    intake.handle(request("gone", DIGITS))  # the same id again, while the first still compiles
    serve(engine, intake, lambda: intake.is_waiting or not engine.scheduler.is_idle)
    assert engine.last("gone").finish_reason.type == "stop"
    assert engine.scheduler.metrics.num_aborted == 1


def test_too_many_that_wait_are_refused(engine, slow):
    intake = make_intake(engine, max_held=2)
    for i in range(3):
        intake.handle(request(f"r{i}", f"[0-9]{{{i + 1}}}"))
    refusal = engine.last("r2").finish_reason
    assert refusal.status_code == 503 and "2 requests wait" in refusal.message
    serve(engine, intake, lambda: intake.is_waiting or not engine.scheduler.is_idle)
    assert [engine.last(f"r{i}").finish_reason.type for i in range(2)] == ["stop", "stop"]


def test_llguidance_compiles_without_the_interpreters_lock(engine):
    """What the design stands on; a version that keeps the lock would stop the loop all the same."""
    regex = "(" + "|".join(f"{i:05d}" for i in range(60_000)) + ")"
    done = threading.Event()
    took = []

    def compile_it():
        started = time.monotonic()
        assert not isinstance(engine.built.grammars.try_compile("regex", regex), ValueError)
        took.append(time.monotonic() - started)
        done.set()

    threading.Thread(target=compile_it).start()
    longest, last = 0.0, time.monotonic()
    while not done.is_set():
        time.sleep(0.001)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    print(f"compiled in {took[0]:.3f} s, longest pause beside it {longest:.3f} s")
    assert longest < max(0.03, took[0] / 2)


def test_a_table_that_cannot_be_built_refuses_and_does_not_end_the_server(engine, monkeypatch):
    def broken(*args):
        raise ValueError("no such tokenizer")

    monkeypatch.setattr(compiler_module, "_vocabulary", broken)
    grammars = GrammarCompiler(engine.built.grammars._tokenizer, vocab_size=4096, end_ids=[4064])
    grammars.prepare()
    assert grammars.is_quick("regex", DIGITS)
    with pytest.raises(ValueError, match="regex: llguidance cannot use this server's tokenizer"):
        grammars.compile("regex", DIGITS)


class Channel:
    """Stands for the sockets: one batch of frames a turn, and a record of what was sent."""

    def __init__(self, log, frames):
        self.log, self.frames, self.sent, self.waits = log, frames, [], []

    def send(self, message):
        self.sent.append(message)
        self.log.append(type(message).__name__)

    def drain(self, wait_ms):
        self.waits.append(wait_ms)
        if self.frames:
            return [encode_message(self.frames.pop(0))]
        time.sleep(wait_ms / 1000)
        ended = [x for x in self.sent if not isinstance(x, ReadyOutput)]
        done = ended and ended[-1].items[-1].finish_reason is not None
        return [encode_message(ShutdownReq())] if done else []


def test_the_table_is_built_before_the_server_is_ready(monkeypatch, slow):
    """Built for the first request it would stop the loop for seconds, with the lock held."""
    log = []
    vocabulary = compiler_module._vocabulary

    def noted(*args):
        log.append("table")
        return vocabulary(*args)

    monkeypatch.setattr(compiler_module, "_vocabulary", noted)
    args = run_resolution_pipeline(
        ServerArgs(model_path="demo", device="cpu", max_total_tokens=1024)
    )
    channel = Channel(log, [request("digits", DIGITS)])
    assert scheduler_process._serve(args.to_dict(), channel) == 0
    assert log[:2] == ["table", "ReadyOutput"] and log.count("table") == 1
    assert channel.sent[-1].items[-1].finish_reason.type == "stop"
    # An idle server looks often while something is compiled, so that the request starts at once.
    assert scheduler_process.COMPILE_POLL_MS in channel.waits


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
