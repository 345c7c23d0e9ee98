"""Serve the bundled model with lossless verify, then with the default verify, and compare.

    python -m sglang.demo

Streams one completion to the terminal, sends the same prompts to both servers and prints one table.
The exit status is 0 only if every prompt gave the same token ids on both. Imports no torch.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.srt.utils.network import find_free_port

PROMPTS = (
    "It was a truth which everybody in the neighbourhood acknowledged, that",
    "The captain stood upon the deck and looked out over the sea, and",
    "To be a good king, a man must first",
    "In the beginning there was",
    "The united states and the people of this country have",
    "A function that returns a list of all the items in",
    "She had never been so happy as when her sister",
    "And the lord said unto the people, let",
)
LOSSLESS_FLAG = "--enable-linear-lossless-verify"
SIZE_FLAGS = (
    "--max-running-requests",
    "8",
    "--max-mamba-cache-size",
    "48",
    "--max-total-tokens",
    "100000000",
)
"""The same requests and states on both servers, so that all memory saved goes to the KV pool."""
SERVER_THAT_ENDS_WITH_US = """
import runpy, sys
from sglang.srt.managers.parent_watch import die_with_parent
die_with_parent(int(sys.argv.pop(1)))
runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
"""
MOST_TOKENS = 4096
"""Half the context of the bundled model."""
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 10.0
REQUEST_TIMEOUT_S = 120.0
LOG_TAIL_LINES = 40


class DemoError(Exception):
    """The demo cannot go on; the text says why."""


@dataclass(frozen=True)
class Measured:
    """What one server answered.

    output_ids       token ids for each prompt
    accept_length    tokens per verify step, bonus token included
    scratch_bytes    memory that the roll-back of speculative steps needs
    total_tokens     tokens that fit the KV pool
    tokens_per_s     generated tokens per second of the measured prompts, one at a time
    """

    output_ids: list[list[int]]
    accept_length: float
    scratch_bytes: int
    total_tokens: int
    tokens_per_s: float


def call(url: str, body: dict[str, Any] | None = None) -> Any:
    """GET, or POST with a JSON body; return the parsed reply.

    Raises: DemoError with the server's words for any status but 200.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with answered(request) as reply:
        return json.load(reply)


@contextlib.contextmanager
def answered(request: urllib.request.Request) -> Iterator[Any]:
    """The reply to read. Raises: DemoError with the server's words, also if it breaks off."""
    url = request.full_url
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as reply:
            yield reply
    except urllib.error.HTTPError as error:
        raise DemoError(f"{url}: {error.code} {error.read().decode(errors='replace')}") from error
    except (OSError, http.client.HTTPException) as error:
        raise DemoError(f"{url}: {error}") from error


def is_ready(url: str) -> bool:
    """Whether the server answers that it is healthy."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except (OSError, http.client.HTTPException):
        return False


def wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Wait for a started server. Raises: DemoError with the end of its log if it gives up."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not is_ready(url):
        ended = process.poll()
        if ended is not None or time.monotonic() > deadline:
            why = f"exited with status {ended}" if ended is not None else "is not ready"
            tail = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
            raise DemoError("\n".join([f"the server {why}; the end of its log:", *tail]))
        time.sleep(0.1)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a server that we started: politely first, with its children if it must be."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        # The server leads a session of its own, so this reaches it and its children alone.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def running_server(model: str, flags: Sequence[str]) -> Iterator[str]:
    """Start a server on a free port, yield its address, and stop it whatever happens."""
    port = find_free_port()
    command = [sys.executable, "-c", SERVER_THAT_ENDS_WITH_US, str(os.getpid())]
    command += ["--model-path", model, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--speculative-algorithm", "NEXTN"]
    with tempfile.TemporaryDirectory(prefix="sglang-demo-") as folder:
        log = Path(folder) / "server.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*command, *flags],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                url = f"http://127.0.0.1:{port}"
                wait_until_ready(process, url, log)
                yield url
            finally:
                stop(process)


def stream_to_terminal(url: str, prompt: str, max_tokens: int) -> None:
    """Stream one completion through the OpenAI route, printing text as it comes."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    body["model"] = call(f"{url}/v1/models")["data"][0]["id"]
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    print(prompt, end="", flush=True)
    with answered(request) as reply:
        for line in reply:
            text = line.decode().strip()
            if not text.startswith("data:") or text == "data: [DONE]":
                continue
            for choice in json.loads(text[len("data:") :])["choices"]:
                print(choice["text"], end="", flush=True)
    print("\n", flush=True)


def generate(url: str, prompt: str, max_tokens: int) -> dict[str, Any]:
    """The reply to one greedy prompt, always with `max_tokens` tokens."""
    params = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
    reply: dict[str, Any] = call(f"{url}/generate", {"text": prompt, "sampling_params": params})
    return reply


def accept_length(replies: Sequence[dict[str, Any]]) -> float:
    """Tokens per verify step over all replies, bonus token included."""
    metas = [reply["meta_info"] for reply in replies]
    num_steps = sum(meta["spec_verify_ct"] for meta in metas)
    num_tokens = sum(meta["spec_accept_length"] * meta["spec_verify_ct"] for meta in metas)
    return num_tokens / num_steps if num_steps else 0.0


def measure(url: str, max_tokens: int) -> Measured:
    """Send every prompt to one server, one after the other."""
    generate(url, PROMPTS[0], 8)  # the first request pays for what is set up once
    started = time.perf_counter()
    replies = [generate(url, prompt, max_tokens) for prompt in PROMPTS]
    seconds = time.perf_counter() - started
    output_ids = [list(reply["output_ids"]) for reply in replies]
    state = call(f"{url}/get_server_info")["internal_states"][0]
    return Measured(
        output_ids=output_ids,
        accept_length=accept_length(replies),
        scratch_bytes=int(state["verify_scratch_bytes"]),
        total_tokens=int(state["max_total_num_tokens"]),
        tokens_per_s=sum(map(len, output_ids)) / seconds,
    )


def num_equal(lossless: Measured, default: Measured) -> int:
    """How many prompts gave the same ids, all of them not empty."""
    pairs = zip(lossless.output_ids, default.output_ids, strict=True)
    return sum(a == b and len(a) > 0 for a, b in pairs)


def format_table(lossless: Measured, default: Measured) -> str:
    """One table: a row for each figure, a column for each server."""
    equal, total = num_equal(lossless, default), len(PROMPTS)
    verdict = "yes" if equal == total else "NO"
    rows = [
        ("", "default verify", "lossless verify"),
        ("ids equal", "", f"{verdict} ({equal}/{total} prompts)"),
        ("accept length", f"{default.accept_length:.2f}", f"{lossless.accept_length:.2f}"),
        ("verify scratch, bytes", f"{default.scratch_bytes:,}", f"{lossless.scratch_bytes:,}"),
        ("max_total_num_tokens", f"{default.total_tokens:,}", f"{lossless.total_tokens:,}"),
        ("tokens/s", f"{default.tokens_per_s:,.0f}", f"{lossless.tokens_per_s:,.0f}"),
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}" for a, b, c in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def run(model: str, max_tokens: int, flags: Sequence[str]) -> bool:
    """Run both servers one after the other; return whether all ids were equal."""
    print(f"starting {model} with NEXTN drafts and {LOSSLESS_FLAG} ...", flush=True)
    with running_server(model, [LOSSLESS_FLAG, *flags]) as url:
        print(f"ready at {url}; streaming a completion:\n", flush=True)
        stream_to_terminal(url, PROMPTS[0], max_tokens)
        print(f"running {len(PROMPTS)} prompts of {max_tokens} tokens ...", flush=True)
        lossless = measure(url, max_tokens)
    print("starting the same model with the default verify ...", flush=True)
    with running_server(model, flags) as url:
        print(f"running the same {len(PROMPTS)} prompts ...\n", flush=True)
        default = measure(url, max_tokens)
    print(format_table(lossless, default), flush=True)
    return num_equal(lossless, default) == len(PROMPTS)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; 0 if all ids were equal."""
    parser = argparse.ArgumentParser(prog="python -m sglang.demo", description=__doc__)
    parser.add_argument("--model-path", default="demo", help="model to serve (default: demo)")
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens for each prompt")
    parser.add_argument(
        "--device-memory-gb",
        default="0.5",
        help="memory that each server plans with, in GiB (default: 0.5)",
    )
    parser.add_argument("--device", default="cpu", help="device of both servers (default: cpu)")
    args = parser.parse_args(argv)
    if not 1 <= args.max_tokens <= MOST_TOKENS:
        parser.error(
            f"--max-tokens {args.max_tokens}: must be at least 1 and at most {MOST_TOKENS}"
        )
    flags = ["--device", args.device, "--device-memory-gb", args.device_memory_gb, *SIZE_FLAGS]
    # A terminated demo must not leave a server behind: turn SIGTERM into an exception.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return 0 if run(args.model_path, args.max_tokens, flags) else 1
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
