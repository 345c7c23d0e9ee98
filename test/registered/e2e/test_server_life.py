"""Starting, serving, losing clients, losing the scheduler, stopping; keys, limits, queues."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
import time

import httpx
import pytest

from sglang.srt.arg_groups.pipeline import run_resolution_pipeline
from sglang.srt.entrypoints import front_end
from sglang.srt.managers.errors import RequestError
from sglang.srt.managers.request_state import GenerateReqInput
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.network import find_free_port
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.front_end_case import FakeServer, is_alive, write_front_end_model

register_cpu_ci(est_time=45, suite="e2e")

SLOW = {"step_s": 0.02}
LONG = {"prompt": "abc", "max_tokens": 60}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_front_end_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def slow(model):
    with FakeServer(model, options=SLOW) as server:
        yield server.wait_ready()


def wait_until(condition, timeout_s=5.0):
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


def in_thread(call):
    """Run `call` in a thread; `.result` holds what it returned or raised."""

    def run():
        try:
            thread.result = call()
        except Exception as error:
            thread.result = error

    thread = threading.Thread(target=run, daemon=True)
    thread.result = None
    thread.start()
    return thread


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_leaves_frees_its_requests(slow, path, stream):
    """Catches requests that run on for nobody (F87); n is 2, so both must go."""
    body = {
        "/v1/completions": LONG | {"n": 2},
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": "a"}],
            "n": 2,
            "min_tokens": 30,
        },
        "/generate": {"text": "abc", "sampling_params": {"max_new_tokens": 60, "n": 2}},
    }[path]
    before = slow.counts()
    data = json.dumps(body | {"stream": stream}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", slow.port)) as connection:
        connection.sendall(head + data)
        if stream:
            assert connection.recv(100)
        assert wait_until(lambda: slow.counts()["num_running"] == 2)
    assert wait_until(lambda: slow.counts()["num_running"] == 0, 3.0)
    after = slow.counts()
    assert after["aborts"] - before["aborts"] == 2
    assert after["finished"] == before["finished"]


def test_abort_by_rid(slow):
    """Catches an abort that ends another request, or leaves the caller waiting."""
    post = lambda rid: httpx.post(slow.url + "/v1/completions", json=LONG | {"rid": rid})  # noqa: E731
    threads = [in_thread(lambda rid=rid: post(rid)) for rid in ("first", "second")]
    assert wait_until(lambda: slow.counts()["num_running"] == 2)
    assert httpx.post(slow.url + "/abort_request", json={"rid": "first"}).status_code == 200
    for thread in threads:
        thread.join(10)
    reasons = [thread.result.json()["choices"][0]["finish_reason"] for thread in threads]
    assert reasons == ["abort", "length"]
    assert httpx.post(slow.url + "/abort_request", json={}).status_code == 400


def test_one_bad_request_disturbs_no_other(slow):
    """Catches a fault that reaches its neighbours, and a flush that harms them (F89, F98)."""
    thread = in_thread(lambda: httpx.post(slow.url + "/v1/completions", json=LONG))
    assert wait_until(lambda: slow.counts()["num_running"] == 1)
    for body in ({"prompt": ""}, {"prompt": [10**6]}, {"prompt": "a", "temperature": -1}):
        assert httpx.post(slow.url + "/v1/completions", json=body).status_code == 400
    assert httpx.post(slow.url + "/flush_cache").status_code == 400
    thread.join(10)
    assert thread.result.json()["choices"][0]["text"] == "abc" * 20


def test_duplicate_rid_is_refused(slow):
    """Catches two requests that share a row of the request table."""
    thread = in_thread(
        lambda: httpx.post(slow.url + "/v1/completions", json=LONG | {"rid": "same"})
    )
    assert wait_until(lambda: slow.counts()["num_running"] == 1)
    reply = httpx.post(slow.url + "/v1/completions", json=LONG | {"rid": "same"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "rid")
    thread.join(10)
    assert thread.result.status_code == 200
    reply = httpx.post(
        slow.url + "/v1/completions",
        json={"prompt": "a", "max_tokens": 1},
        headers={"x-request-id": "from-router"},
    )
    assert reply.json()["id"] == reply.headers["x-request-id"] == "from-router"


def test_many_streams_at_once(slow):
    """Catches text that ends up in another stream."""

    def stream(letter):
        body = {"prompt": letter, "max_tokens": 10, "stream": True}
        text = ""
        with httpx.stream("POST", slow.url + "/v1/completions", json=body, timeout=30) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        return text

    letters = [chr(97 + i % 26) for i in range(32)]
    threads = [in_thread(lambda letter=letter: stream(letter)) for letter in letters]
    for thread in threads:
        thread.join(30)
    assert [thread.result for thread in threads] == [letter * 10 for letter in letters]


@pytest.fixture(scope="module")
def guarded(model):
    """A server with every guard on."""
    flags = (
        *("--api-key", "user", "--admin-api-key", "admin", "--allow-auto-truncate"),
        *("--cors-allow-origins", "http://here", "--max-request-body-mb", "0.01"),
    )
    with FakeServer(model, *flags) as server:
        yield server.wait_ready()


AS_USER = {"Authorization": "Bearer user"}


def test_keys(guarded):
    """Catches an open route, a closed probe, and a user key that can flush."""

    def status(method, path, headers=None):
        body = {"prompt": "a", "max_tokens": 1} if method == "POST" else None
        return httpx.request(method, guarded.url + path, headers=headers, json=body).status_code

    for path in ("/health", "/ready", "/health_generate", "/metrics"):
        assert status("GET", path) == 200
    for path in ("/v1/models", "/server_info", "/nothing"):
        assert status("GET", path) == 401
        assert status("GET", path, {"Authorization": "Bearer wrong"}) == 401
        assert status("GET", path, {"Authorization": "Basic user"}) == 401
        assert status("GET", path, AS_USER) in (200, 404)
    assert status("POST", "/v1/completions") == 401
    assert status("POST", "/v1/completions", AS_USER) == 200
    assert status("POST", "/v1/completions", {"x-api-key": "user"}) == 200
    assert status("POST", "/flush_cache", AS_USER) == 401
    assert status("POST", "/flush_cache", {"Authorization": "Bearer admin"}) == 200
    assert status("OPTIONS", "/v1/models") != 401


def test_cors_opens_only_for_the_named_origin(guarded, slow):
    """Catches CORS that is open by default or for everyone."""
    for server, origin, allowed in (
        (guarded, "http://here", "http://here"),
        (guarded, "http://there", None),
        (slow, "http://here", None),
    ):
        headers = AS_USER | {"Origin": origin}
        reply = httpx.get(server.url + "/v1/models", headers=headers)
        assert reply.headers.get("access-control-allow-origin") == allowed


def test_body_limit(guarded):
    """Catches a body that fills the memory, with and without its length announced."""
    big = json.dumps({"prompt": "a" * 20000}).encode()
    url = guarded.url + "/v1/completions"
    for content in (big, iter([big[:9000], big[9000:]])):
        reply = httpx.post(url, content=content, headers=AS_USER)
        assert (reply.status_code, reply.json()["error"]["code"]) == (413, "body_too_large")
    body = {"prompt": "a", "max_tokens": 1}
    assert httpx.post(url, json=body, headers=AS_USER).status_code == 200


def test_long_prompt_is_cut_when_asked(guarded):
    """Catches truncation at the wrong end, and truncation that nobody asked for."""
    body = {"prompt": "a" * 70 + "b" * 62, "max_tokens": 5}
    reply = httpx.post(guarded.url + "/v1/completions", json=body, headers=AS_USER).json()
    assert reply["usage"] == {
        "prompt_tokens": 63,
        "completion_tokens": 1,
        "total_tokens": 64,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert reply["choices"][0]["text"] == "a"


def test_full_queue_answers_every_request(model):
    """Catches a request over the limit that hangs (F93); the fake runs 8, and 2 may wait."""
    with FakeServer(model, "--max-queued-requests", "2", options=SLOW) as server:
        server.wait_ready()
        threads = [
            in_thread(lambda: httpx.post(server.url + "/v1/completions", json=LONG, timeout=20))
            for _ in range(20)
        ]
        for thread in threads:
            thread.join(20)
        statuses = sorted(thread.result.status_code for thread in threads)
        assert statuses == [200] * 10 + [503] * 10
        refused = next(t.result for t in threads if t.result.status_code == 503)
        assert refused.headers["retry-after"] and refused.json()["error"]["code"] == "queue_full"


def test_request_log_has_sizes_and_no_text(model):
    """Catches a log line that does not parse, or that tells what users wrote."""
    with FakeServer(model, "--log-requests", "--skip-server-warmup") as server:
        server.wait_ready()
        body = {"prompt": "secret", "max_tokens": 3, "rid": "logged"}
        assert httpx.post(server.url + "/v1/completions", json=body).status_code == 200
        server.stop()
        (line,) = [line for line in server.log().splitlines() if "] request {" in line]
        entry = json.loads(line.partition("] request ")[2])
        assert (entry["rid"], entry["prompt_tokens"], entry["completion_tokens"]) == (
            "logged",
            6,
            3,
        )
        assert entry["finish_reason"] == "length" and "secret" not in line


def test_loading_answers_503(model):
    """Catches a probe that is green, or refused, while the model loads."""
    with FakeServer(model, options={"load_s": 1.5}) as server:
        assert wait_until(lambda: server.status("/health") == 503)
        reply = httpx.post(server.url + "/v1/completions", json=LONG)
        assert reply.status_code == 503 and "loading" in reply.json()["error"]["message"]
        server.wait_ready()


def test_failed_load_exits_with_the_reason(model):
    """Catches a server that stays up, or exits 0, without a model."""
    with FakeServer(model, options={"fail": "no memory for weights"}) as server:
        assert server.process.wait(20) == 1
        assert "no memory for weights" in server.log()


def test_dead_scheduler_ends_requests_and_server(model):
    """Catches requests that wait for a process which is gone."""
    with FakeServer(model, options=SLOW) as server:
        server.wait_ready()
        running = in_thread(lambda: httpx.post(server.url + "/v1/completions", json=LONG))
        assert wait_until(lambda: server.counts()["num_running"] == 1)
        fatal = httpx.post(server.url + "/v1/completions", json=LONG | {"priority": -7})
        running.join(10)
        for reply in (fatal, running.result):
            assert reply.status_code == 503
            assert "scheduler process ended (exit code 3)" in reply.json()["error"]["message"]
        assert server.process.wait(20) == 1
        assert "scheduler process ended" in server.log()


def test_stuck_scheduler_is_ended(model, monkeypatch):
    """Catches a hang that looks healthy for ever and keeps its requests waiting (F94)."""
    monkeypatch.setattr(front_end, "BUSY_HEALTH_TIMEOUT_SECONDS", 0.5)
    resolved = run_resolution_pipeline(ServerArgs(model_path=str(model), skip_server_warmup=True))
    args = ServerArgs.from_resolved_dict(resolved.to_dict() | {"watchdog_timeout": 3.0})

    async def main():
        front = front_end.FrontEnd(args, scheduler_module="sglang.test.fake_scheduler")
        front.start()
        await front.wait_ready()
        assert front.unhealthy_reason() is None
        params = front.manager.sampling_params({"max_new_tokens": 1})
        stuck = GenerateReqInput("r", params, text="a", priority=-10)
        group = await front.manager.start("r", [stuck])
        await asyncio.sleep(1.0)
        assert "silent" in front.unhealthy_reason()
        with pytest.raises(RequestError, match="--watchdog-timeout 3 s"):
            await asyncio.wait_for(group.finish(), 15)
        assert not is_alive(front.client.pid)
        await front.shutdown()

    asyncio.run(main())


def test_killed_scheduler_breaks_streams_with_an_error(model):
    """Catches a stream that just stops."""
    with FakeServer(model, options=SLOW) as server:
        server.wait_ready()
        (child,) = server.children()
        body = LONG | {"stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body) as reply:
            lines = iter(line for line in reply.iter_lines() if line)
            next(lines)
            os.kill(child, signal.SIGKILL)
            rest = list(lines)
        assert "killed by signal 9" in rest[-2] and rest[-1] == "data: [DONE]"
        assert server.process.wait(20) == 1


def test_hard_kill_leaves_no_child_and_the_port_free(model):
    """Catches a scheduler that outlives its server, and a port that stays taken (F95)."""
    with FakeServer(model, options=SLOW) as server:
        server.wait_ready()
        (child,) = server.children()
        in_thread(lambda: httpx.post(server.url + "/v1/completions", json=LONG))
        assert wait_until(lambda: server.counts()["num_running"] == 1)
        server.process.kill()
        server.process.wait()
        assert wait_until(lambda: not is_alive(child), 5.0)
        with FakeServer(model, "--port", str(server.port)) as again:
            again.url = server.url
            again.wait_ready()


def test_sigterm_drains(model):
    """Catches a drain that cuts a request, takes new ones, or exits non-zero (F96)."""
    with FakeServer(model, options=SLOW) as server:
        server.wait_ready()
        (child,) = server.children()
        running = in_thread(lambda: httpx.post(server.url + "/v1/completions", json=LONG))
        assert wait_until(lambda: server.counts()["num_running"] == 1)
        server.process.send_signal(signal.SIGTERM)
        assert wait_until(lambda: server.status("/health") == 503, 3.0)
        refused = httpx.post(server.url + "/v1/completions", json=LONG)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        running.join(10)
        assert running.result.json()["choices"][0]["text"] == "abc" * 20
        assert server.process.wait(10) == 0
        assert not is_alive(child)


def test_drain_has_a_limit_and_a_second_signal_ends_at_once(model):
    """Catches a server that one slow request keeps alive."""
    slow = {"step_s": 0.5}
    with FakeServer(model, "--drain-timeout", "0.3", options=slow) as server:
        server.wait_ready()
        running = in_thread(
            lambda: httpx.post(server.url + "/v1/completions", json=LONG, timeout=20)
        )
        assert wait_until(lambda: server.counts()["num_running"] == 1)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0
        running.join(5)
        assert running.result.status_code == 503
    with FakeServer(model, options=slow) as server:
        server.wait_ready()
        (child,) = server.children()
        in_thread(lambda: httpx.post(server.url + "/v1/completions", json=LONG, timeout=20))
        assert wait_until(lambda: server.counts()["num_running"] == 1)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(5) == 128 + signal.SIGTERM
        assert wait_until(lambda: not is_alive(child), 5.0)


@pytest.mark.parametrize("options", [{"step_s": 0.5}, {"load_s": 30}], ids=["running", "loading"])
@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_forced_end_takes_one_line(model, options, sig):
    """Catches tracebacks of everything that a second signal cancels."""
    with FakeServer(model, options=options) as server:
        if "step_s" in options:
            server.wait_ready()
            for stream in (True, False):
                body = LONG | {"stream": stream}
                in_thread(lambda body=body: httpx.post(server.url + "/v1/completions", json=body))
            assert wait_until(lambda: server.counts()["num_running"] == 2)
        else:
            assert wait_until(lambda: server.status("/health") == 503)
        server.process.send_signal(sig)
        assert wait_until(lambda: "a second signal ends at once" in server.log())
        for _ in range(2):
            server.process.send_signal(sig)
        assert server.process.wait(5) == 128 + sig
        (last,) = server.log().partition("ends at once\n")[2].splitlines()
        assert f"a second signal ({sig.name}): ended at once, exit code {128 + sig}, " in last


def test_what_is_decided_at_start_is_logged(model):
    """Catches a drawn seed, a dropped size and a chosen port that nobody gets to know."""
    flags = ("--port", "0", "--device", "cpu", "--cuda-graph-bs", "4")
    with FakeServer(model, *flags, "--skip-server-warmup") as server:
        assert wait_until(lambda: "The server is ready" in server.log(), 20)
        lines = server.log().splitlines()
        for text in ("random seed: ", "--cuda-graph-bs 4: ignored"):
            assert any(line.startswith("[20") and text in line for line in lines)
        (ready,) = [line for line in lines if "The server is ready" in line]
        server.url = ready.partition("ready: ")[2].partition(",")[0]
        assert server.get("/server_info")["port"] == int(server.url.rpartition(":")[2]) > 0


def test_taken_port_is_named(model):
    """Catches a port conflict that shows only after the model has loaded."""
    port = find_free_port()
    with socket.create_server(("127.0.0.1", port)):
        with FakeServer(model, "--port", str(port)) as server:
            assert server.process.wait(20) == 1
            assert f"--port {port}" in server.log()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
