"""Two servers behind the real sglang-router and smg, unmodified on loopback."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

import httpx
import openai
import pytest

from sglang.srt.utils.network import find_free_port
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.front_end_case import FakeServer, write_front_end_model

register_cpu_ci(est_time=40, suite="e2e")

ROUTERS = {
    "sglang_router": "from sglang_router.launch_router import main; main()",
    "smg": "import sys; sys.argv.insert(1, 'launch'); from smg.cli import main; main()",
}
LAUNCHERS = {
    "sglang_router": (
        *("-m", "sglang_router.launch_server", "--dp-size", "2"),
        *("--router-worker-startup-check-interval", "1", "--router-policy", "round_robin"),
    ),
    "smg": (
        *("-c", "from smg.cli import main; main()", "serve", "--backend", "sglang"),
        *("--connection-mode", "http", "--data-parallel-size", "2"),
        *("--router-worker-startup-check-interval", "1", "--router-policy", "round_robin"),
    ),
}
LOADING_S = 2.0


class Router:
    """One router process in front of servers."""

    def __init__(self, *command: str, prefix: str = "") -> None:
        self.port = find_free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = tempfile.TemporaryFile()
        metrics = (f"--{prefix}prometheus-port", str(find_free_port()))
        self.process = subprocess.Popen(
            [
                *(sys.executable, *command),
                *("--host", "127.0.0.1", "--port", str(self.port), *metrics),
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "NO_COLOR": "1"},
            start_new_session=True,
        )

    @classmethod
    def over(cls, package: str, urls: list[str]) -> Router:
        """A router in front of running servers."""
        return cls(
            *("-c", ROUTERS[package], "--worker-urls", *urls, "--policy", "round_robin"),
            *("--worker-startup-check-interval", "1", "--health-check-interval-secs", "1"),
        )

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def wait_ready(self, model: str) -> None:
        """Wait until a request is answered. Raises: AssertionError with the router's log."""
        body = {"model": model, "prompt": "ab", "max_tokens": 1}
        end = time.monotonic() + 90
        last = "no answer"
        while time.monotonic() < end and self.process.poll() is None:
            try:
                reply = httpx.post(self.url + "/v1/completions", json=body, timeout=10)
                if reply.status_code == 200:
                    return
                last = f"{reply.status_code} {reply.text[:200]}"
            except httpx.HTTPError as error:  # not listening yet
                last = repr(error)
            time.sleep(0.2)
        raise AssertionError(f"not ready, last: {last}\n{self.log()[-3000:]}")

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; it comes with the extra [router]")


@pytest.fixture(scope="module", params=ROUTERS)
def routed(request, tmp_path_factory):
    """(router's URL, the two servers); the servers are still loading when the router starts."""
    needs(request.param)
    model = write_front_end_model(tmp_path_factory.mktemp("model"))
    flags = ("--served-model-name", "tiny")
    options = {"load_s": LOADING_S, "step_s": 0.01}
    servers = [FakeServer(model, *flags, options=options) for _ in range(2)]
    router = Router.over(request.param, [server.url for server in servers])
    try:
        router.wait_ready("tiny")
        for server in servers:
            server.wait_ready()
        yield router.url, servers
    finally:
        router.stop()
        for server in servers:
            server.stop()


@pytest.fixture
def client(routed):
    return openai.OpenAI(base_url=routed[0] + "/v1", api_key="none", max_retries=0, timeout=30)


def test_models_and_health(routed):
    url, _ = routed
    assert httpx.get(url + "/health", timeout=10).status_code == 200
    names = [card["id"] for card in httpx.get(url + "/v1/models", timeout=10).json()["data"]]
    assert set(names) == {"tiny"}


def test_completions_reach_both_servers(routed, client):
    """Catches a server that the router takes for dead, and answers that differ when routed."""
    before = [server.counts()["requests"] for server in routed[1]]
    for at in range(8):
        text = chr(97 + at) * 3
        reply = client.completions.create(model="tiny", prompt=text, max_tokens=5)
        assert reply.choices[0].text == chr(97 + at) * 5
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (3, 5)
    after = [server.counts()["requests"] for server in routed[1]]
    assert all(now > then for now, then in zip(after, before))


def test_chat_streams(client):
    """Catches a first chunk without a role, or a usage chunk that the router drops."""
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text and chunks[-1].usage.completion_tokens == 12


def test_native_generate(routed):
    """Catches the null and no-op fields that routers add and a server refuses."""
    url, servers = routed
    body = {"text": "abc", "sampling_params": {"max_new_tokens": 6, "temperature": 0.7}}
    direct = httpx.post(servers[0].url + "/generate", json=body, timeout=20).json()
    reply = httpx.post(url + "/generate", json=body, timeout=20)
    assert reply.status_code == 200, reply.text
    assert reply.json()["text"] == direct["text"] == "abcabc"
    lists = {"input_ids": [[97], [98, 99]], "sampling_params": {"max_new_tokens": 2}}
    replies = httpx.post(url + "/generate", json=lists, timeout=20).json()
    assert [r["text"] for r in replies] == ["aa", "bc"]
    with httpx.stream("POST", url + "/generate", json=body | {"stream": True}, timeout=20) as reply:
        texts = [
            json.loads(line[6:])["text"]
            for line in reply.iter_lines()
            if line.startswith("data: {")
        ]
    assert texts[-1] == direct["text"] and texts == sorted(texts, key=len)


def test_errors_come_through(routed, client):
    """Catches a 400 that the router retries or turns into its own error."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="a" * 500, max_tokens=1)
    assert caught.value.body["code"] == "context_length_exceeded"


def test_a_client_that_leaves_frees_both(routed):
    """Catches a request that goes on behind the router (F87)."""
    url, servers = routed
    body = {"model": "tiny", "prompt": "ab", "max_tokens": 60, "stream": True}
    for _ in range(4):
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=20) as reply:
            next(reply.iter_bytes())
    end = time.monotonic() + 10
    while any(server.counts()["num_running"] for server in servers):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_flush_reaches_both(routed):
    url, servers = routed
    before = [server.counts()["flushes"] for server in servers]
    assert httpx.post(url + "/flush_cache", timeout=20).status_code == 200
    after = [server.counts()["flushes"] for server in servers]
    assert all(now == then + 1 for now, then in zip(after, before))


def test_a_server_that_drains_gets_no_more(routed, client):
    """Catches a draining server that answers 200 to probes, so that requests still go there. Last,
    because it ends a server."""
    _, servers = routed
    servers[0].process.send_signal(signal.SIGTERM)
    servers[0].process.wait(20)
    time.sleep(4)  # several probes of the router
    for _ in range(4):
        assert client.completions.create(model="tiny", prompt="ab", max_tokens=2).choices


@pytest.mark.parametrize("package", LAUNCHERS)
def test_launchers_that_start_our_servers(package):
    """Catches names of ours that a launcher imports, and arguments that it sets for each replica."""
    needs(package)
    flags = ("--model-path", "demo", "--max-total-tokens", "2048")
    launcher = Router(*LAUNCHERS[package], *flags, prefix="router-")
    try:
        launcher.wait_ready("demo")
        end = time.monotonic() + 60
        while (log := launcher.log()).count("The server is ready") < 2:
            assert time.monotonic() < end and "Traceback" not in log, log[-3000:]
            time.sleep(0.5)
        body = {"model": "demo", "prompt": "The sea", "max_tokens": 5}
        for _ in range(4):
            reply = httpx.post(launcher.url + "/v1/completions", json=body, timeout=20)
            assert reply.json()["usage"]["completion_tokens"] == 5
    finally:
        launcher.process.send_signal(signal.SIGINT)
        try:
            launcher.process.wait(15)
        finally:
            launcher.stop()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
