"""The demo's verdict: its exit status is what a script relies on.

Mistakes these catch: an unequal id that still exits 0, two empty answers counted as equal, a server
left running, a failed start that hides its reason.
"""

from __future__ import annotations

import contextlib
import http.server
import io
import json
import pathlib
import subprocess
import sys
import threading
import time
import urllib.error

import pytest

from sglang import demo
from sglang.srt.utils.network import find_free_port, is_port_available
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="unit")


class StubServer:
    """Answers like a server; `change` alters the ids of one arm."""

    def __init__(self, change=lambda ids: ids) -> None:
        stub = self
        self.seen_flags: list[str] = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def _json(self, value) -> None:
                body = json.dumps(value).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self):
                if self.path == "/v1/models":
                    return self._json({"data": [{"id": "m"}]})
                state = {
                    "verify_scratch_bytes": 1000,
                    "max_total_num_tokens": 2000,
                }
                return self._json({"internal_states": [state]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/v1/completions":
                    self.send_response(200)
                    self.end_headers()
                    chunk = json.dumps({"choices": [{"text": " streamed"}]})
                    self.wfile.write(f"data: {chunk}\n\ndata: [DONE]\n\n".encode())
                    return None
                count = body["sampling_params"]["max_new_tokens"]
                ids = [len(body["text"]) + i for i in range(count)]
                meta = {"spec_verify_ct": 4, "spec_accept_length": 2.5}
                return self._json({"output_ids": stub.change(ids), "meta_info": meta})

            def log_message(self, *args):
                pass

        self.change = change
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def arms(monkeypatch):
    """Run the demo against two stubs: (lossless, default)."""
    started = []

    def use(lossless: StubServer, default: StubServer) -> list:
        @contextlib.contextmanager
        def running_server(model, flags):
            stub = lossless if demo.LOSSLESS_FLAG in flags else default
            started.append(tuple(flags))
            yield stub.url

        monkeypatch.setattr(demo, "running_server", running_server)
        return started

    stubs = []
    monkeypatch.setattr(sys, "argv", ["demo"])
    yield lambda a, b: (stubs.extend([a, b]), use(a, b))[1]
    for stub in stubs:
        stub.close()


def test_equal_ids_exit_zero_and_print_one_table(arms, capsys):
    started = arms(StubServer(), StubServer())
    assert demo.main(["--max-tokens", "5"]) == 0
    out = capsys.readouterr().out
    assert demo.PROMPTS[0] + " streamed" in out
    for label in ("ids equal", "accept length", "verify scratch", "max_total_num_tokens"):
        assert out.count(label) == 1
    assert f"yes ({len(demo.PROMPTS)}/{len(demo.PROMPTS)} prompts)" in out
    assert [demo.LOSSLESS_FLAG in flags for flags in started] == [True, False]
    assert set(started[0]) - set(started[1]) == {demo.LOSSLESS_FLAG}


@pytest.mark.parametrize(
    "change",
    [lambda ids: [*ids[:-1], ids[-1] + 1], lambda ids: ids[:-1], lambda ids: []],
    ids=["last id differs", "one id less", "nothing"],
)
def test_any_difference_exits_one(change, arms, capsys):
    arms(StubServer(change), StubServer())
    assert demo.main(["--max-tokens", "5"]) == 1
    assert f"NO (0/{len(demo.PROMPTS)} prompts)" in capsys.readouterr().out


def test_two_empty_answers_are_not_equal(arms, capsys):
    arms(StubServer(lambda ids: []), StubServer(lambda ids: []))
    assert demo.main(["--max-tokens", "5"]) == 1


@pytest.mark.parametrize("value", ["0", "-5", "100000"])
def test_a_number_of_tokens_that_cannot_work(value, capsys):
    """Catches a traceback instead of a sentence, after a server was started for nothing."""
    with pytest.raises(SystemExit) as ended:
        demo.main(["--max-tokens", value])
    shown = capsys.readouterr()
    assert ended.value.code == 2 and not shown.out
    assert f"--max-tokens {value}: must be at least 1 and at most 4096" in shown.err


def test_a_refused_stream_is_told_in_the_servers_words(monkeypatch, capsys):
    def refused(request, timeout):
        raise urllib.error.HTTPError(request.full_url, 400, "Bad", {}, io.BytesIO(b"too long"))

    monkeypatch.setattr(demo, "call", lambda url: {"data": [{"id": "demo"}]})
    monkeypatch.setattr("urllib.request.urlopen", refused)
    with pytest.raises(demo.DemoError, match="/v1/completions: 400 too long"):
        demo.stream_to_terminal("http://here", "a", 5)


def test_accept_length_is_over_all_steps():
    metas = [(10, 1.0), (30, 3.0)]
    replies = [
        {"meta_info": {"spec_verify_ct": ct, "spec_accept_length": length}} for ct, length in metas
    ]
    assert demo.accept_length(replies) == 2.5
    assert demo.accept_length([]) == 0.0


def test_there_are_enough_prompts():
    assert len(set(demo.PROMPTS)) >= 8


def test_a_server_that_cannot_start_shows_its_log(tmp_path, capsys):
    assert demo.main(["--model-path", str(tmp_path / "absent")]) == 1
    error = capsys.readouterr().err
    assert "the server exited with status" in error and "absent" in error


def test_a_server_that_ignores_sigterm_is_killed_with_its_children(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "STOP_TIMEOUT_S", 0.5)
    pid_file = tmp_path / "child"
    code = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid))\n"
        "print('up', flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    demo.stop(process)
    process.stdout.close()
    assert process.returncode is not None
    child = int(pid_file.read_text())
    deadline = time.monotonic() + 10
    while is_running(child):
        assert time.monotonic() < deadline, "the server's child is still there"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        status = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_free_ports():
    port = find_free_port()
    assert is_port_available(port, "127.0.0.1")
    with http.server.HTTPServer(("127.0.0.1", port), http.server.BaseHTTPRequestHandler):
        assert not is_port_available(port, "127.0.0.1")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
