"""`sglang.Engine` without HTTP, from scripts, threads and running event loops."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time

import pytest

import sglang
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.front_end_case import is_alive, write_front_end_model

register_cpu_ci(est_time=8, suite="e2e")

FAKE = {"scheduler_module": "sglang.test.fake_scheduler"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_front_end_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def engine(model):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_FAKE_SCHEDULER", json.dumps({"step_s": 0.002}))
        with sglang.Engine(model, **FAKE) as running:
            yield running


def test_generate(engine):
    """Catches replies of another shape than /generate's."""
    params = {"max_new_tokens": 4, "temperature": 0}
    one = engine.generate("ab", params)
    assert one["text"] == "abab" and one["meta_info"]["completion_tokens"] == 4
    assert [r["text"] for r in engine.generate(["a", "b"], params)] == ["aaaa", "bbbb"]
    assert engine.generate(input_ids=[97, 98], sampling_params=params)["output_ids"] == [97, 98] * 2
    texts = [r["text"] for r in engine.generate("ab", params, stream=True)]
    assert texts == ["a", "ab", "aba", "abab"]


def test_async_generate(engine):
    """Catches a call that needs the engine's own loop."""

    async def main():
        params = {"max_new_tokens": 3}
        replies = await asyncio.gather(*(engine.async_generate(c, params) for c in "abc"))
        stream = await engine.async_generate("x", params, stream=True)
        return [r["text"] for r in replies], [r["text"] async for r in stream]

    assert asyncio.run(main()) == (["aaa", "bbb", "ccc"], ["x", "xx", "xxx"])


def test_sync_generate_inside_a_running_loop(engine):
    """Catches "this event loop is already running" in a notebook."""

    async def main():
        return engine.generate("ab", {"max_new_tokens": 2})["text"]

    assert asyncio.run(main()) == "ab"


def test_leaving_early_aborts(engine):
    """Catches requests that run on after a broken loop or a cancelled task."""

    def running():
        return engine.get_server_info()["internal_states"][0]["num_running"]

    for reply in engine.generate("ab", {"max_new_tokens": 60}, stream=True):
        assert reply["text"]
        break

    async def cancelled():
        task = asyncio.create_task(engine.async_generate("ab", {"max_new_tokens": 60}))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    end = time.monotonic() + 2
    while running() and time.monotonic() < end:
        time.sleep(0.01)
    state = engine.get_server_info()["internal_states"][0]
    assert (state["num_running"], state["aborts"]) == (0, 2)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"prompt": ""}, "text is empty"),
        ({"prompt": "a", "sampling_params": {"top_p": 7}}, "top_p must be"),
        ({"prompt": "a", "frobnicate": 1}, "frobnicate is not supported"),
        ({}, "exactly one of text and input_ids"),
    ],
)
def test_faults_are_value_errors(engine, arguments, text):
    """Catches an HTTP error where Python wants an exception."""
    with pytest.raises(ValueError, match=text):
        engine.generate(**arguments)


def test_flush_and_info(engine):
    """Catches calls that only work over HTTP."""
    assert engine.flush_cache() is True
    assert engine.get_server_info()["max_total_num_tokens"] == 4096


def test_failed_start(model, monkeypatch):
    """Catches a constructor that hangs when the model cannot load, or leaves a process."""
    monkeypatch.setenv("SGLANG_FAKE_SCHEDULER", json.dumps({"fail": "bad weights"}))
    with pytest.raises(RuntimeError, match="bad weights"):
        sglang.Engine(model, **FAKE)
    with pytest.raises(ValueError, match="model_path"):
        sglang.Engine(**FAKE)


SCRIPT = """
import sys, sglang
engine = sglang.Engine(sys.argv[1], scheduler_module="sglang.test.fake_scheduler")
print(engine.generate("ab", {"max_new_tokens": 2})["text"], engine._front.client.pid)
assert "torch" not in sys.modules
"""


def test_plain_script_without_main_guard_or_shutdown(model):
    """Catches a script that hangs at its end or leaves its scheduler behind."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, model], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    text, pid = done.stdout.split()
    assert text == "ab" and not is_alive(int(pid))


def test_after_shutdown(model):
    """Catches a second shutdown that fails, and calls that hang."""
    engine = sglang.Engine(model, **FAKE)
    pid = engine._front.client.pid
    left, read_on = (engine.generate("a", {"max_new_tokens": 60}, stream=True) for _ in range(2))
    assert next(left)["text"] and next(read_on)["text"]
    engine.shutdown()
    engine.shutdown()
    assert not is_alive(pid)
    with pytest.raises(RuntimeError, match="shut down"):
        engine.generate("a")
    with pytest.raises(RuntimeError, match="shut down"):
        next(read_on)
    left.close()


def test_a_stream_may_be_collected_in_the_engines_own_thread(engine):
    """Catches an engine that hangs for ever when the garbage collector ends a forgotten stream."""
    stream = engine.generate("ab", {"max_new_tokens": 60}, stream=True)
    next(stream)
    engine._loop.call_soon_threadsafe(stream.close)
    pending = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), engine._loop)
    pending.result(5)
    assert engine.generate("ab", {"max_new_tokens": 2})["meta_info"]["completion_tokens"] == 2


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
