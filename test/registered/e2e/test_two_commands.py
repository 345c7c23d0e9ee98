"""What the README promises, run as it stands: the demo, and the examples on the page.

Mistakes these catch: a demo whose arms differ, a server that the demo leaves behind, an example on
the page that does not run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request

import pytest

from sglang import demo
from sglang.srt.utils.network import find_free_port
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.repo import ROOT

register_cpu_ci(est_time=45, suite="e2e")

README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def our_processes() -> set[int]:
    """Servers and schedulers that descend from this test process."""
    found = set()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/cmdline", "rb") as file:
                words = file.read().split(b"\0")
            with open(f"/proc/{entry}/environ", "rb") as file:
                mark = f"SGLANG_TEST_MARK={os.getpid()}".encode() in file.read()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if mark and any(b"sglang." in word for word in words):
            found.add(int(entry))
    return found


def test_demo_compares_both_verifies_and_leaves_nothing_behind():
    environment = {**os.environ, "SGLANG_TEST_MARK": str(os.getpid())}
    done = subprocess.run(
        [sys.executable, "-m", "sglang.demo", "--max-tokens", "48"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    count = len(demo.PROMPTS)
    assert f"yes ({count}/{count} prompts)" in done.stdout
    numbers = {
        line[:22].strip(): [float(cell.replace(",", "")) for cell in line[22:].split()]
        for line in done.stdout.splitlines()
        if re.match(r"(accept length|verify scratch|max_total)", line)
    }
    default, lossless = numbers["accept length"]
    assert default == lossless > 1.5
    default, lossless = numbers["verify scratch, bytes"]
    assert lossless < default / 5
    default, lossless = numbers["max_total_num_tokens"]
    assert lossless > default
    assert our_processes() == set()


def test_a_killed_demo_takes_its_server_along():
    """Catches a server that nobody will ever stop, because the demo had no time to."""
    environment = {**os.environ, "SGLANG_TEST_MARK": str(os.getpid())}
    with subprocess.Popen(
        [sys.executable, "-m", "sglang.demo"], env=environment, stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert any(line.startswith("ready at") for line in running.stdout)
        assert len(our_processes()) == 3  # the demo, its server, the scheduler
        running.kill()
    deadline = time.monotonic() + 10
    while our_processes() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert our_processes() == set()


def test_python_example_runs():
    (example,) = blocks("python")
    done = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_server_and_curl_examples_run():
    serve = next(b for b in blocks("bash") if "launch_server" in b).replace("\\\n", " ").split()
    curl = next(b for b in blocks("bash") if "curl" in b)
    body = re.search(r"-d '(.*)'", curl)
    path = re.search(r"http://127\.0\.0\.1:30000(\S+)", curl)
    assert serve[:3] == ["python", "-m", "sglang.launch_server"] and body and path
    flags = serve[serve.index("demo") + 1 :]
    with demo.running_server("demo", [f for f in flags if f not in demo_flags()]) as url:
        request = urllib.request.Request(
            url + path[1], body[1].encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            answer = json.load(reply)
    assert answer["choices"][0]["message"]["role"] == "assistant"


def demo_flags() -> tuple[str, ...]:
    """What `running_server` adds by itself."""
    return ("--speculative-algorithm", "NEXTN")


def test_stock_sglang_in_the_environment_stops_the_server(tmp_path):
    stock = tmp_path / "sglang-0.5.21.dist-info"
    stock.mkdir()
    (stock / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.21\n")
    paths = os.pathsep.join([os.environ["PYTHONPATH"], str(tmp_path)])
    port = str(find_free_port())
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "sglang.launch_server", "--model-path", "demo", "--port", port],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert "replaces stock SGLang" in done.stderr and "0.5.21" in done.stderr
    assert time.monotonic() - started < 30


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
