"""A thousand streams and ten thousand clients that leave, over the bundled model with speculation.

The scheduler checks its pools' books whenever it falls idle and ends the server when they are wrong.
"""

from __future__ import annotations

import asyncio
import json
import random
import time

import aiohttp
import httpx
import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.front_end_case import FakeServer

register_cpu_ci(est_time=300, suite="e2e", nightly=True)

NUM_STREAMS = 1_000
NUM_ABORTS = 10_000
AT_ONCE = 250
WORDS = ("the captain", "a list", "she said", "in the beginning", "the king")
LIMIT_SECONDS = 420


@pytest.fixture(scope="module")
def server():
    flags = ("--speculative-algorithm", "NEXTN", "--enable-linear-lossless-verify")
    with FakeServer(
        "demo", "--max-total-tokens", "8192", *flags, module="sglang.launch_server"
    ) as running:
        yield running.wait_ready(120)


def assert_clean(server: FakeServer) -> None:
    """Nothing runs, the pools' books are right, and a flush gives every token back."""
    end = time.monotonic() + 60
    while (load := server.get("/v1/loads")["loads"][0])["num_total_reqs"]:
        assert time.monotonic() < end, load
        time.sleep(0.1)
    time.sleep(6)  # longer than the scheduler waits between two looks at its books
    assert httpx.post(server.url + "/flush_cache", timeout=60).status_code == 200
    body = {"prompt": WORDS[0], "max_tokens": 2}
    assert httpx.post(server.url + "/v1/completions", json=body, timeout=60).status_code == 200
    assert httpx.post(server.url + "/flush_cache", timeout=60).status_code == 200
    assert server.status("/health") == 200
    assert "Traceback" not in server.log()


def session() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=LIMIT_SECONDS)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)


async def stream(client: aiohttp.ClientSession, url: str, prompt: str) -> tuple[str, str | None]:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "stream": True}
    text, reason = "", None
    async with client.post(url + "/v1/completions", json=body) as reply:
        assert reply.status == 200
        async for line in reply.content:
            if line.startswith(b"data: {"):
                choice = json.loads(line[6:])["choices"][0]
                text, reason = text + choice["text"], choice["finish_reason"] or reason
    return text, reason


def test_a_thousand_streams_at_once(server):
    """Catches a limit on connections, text in the wrong stream, and pools that do not add up."""

    async def main() -> tuple[list, list]:
        async with session() as client:
            alone = [await stream(client, server.url, word) for word in WORDS]
            jobs = (stream(client, server.url, WORDS[i % len(WORDS)]) for i in range(NUM_STREAMS))
            return alone, await asyncio.gather(*jobs)

    alone, together = asyncio.run(main())
    assert together == [alone[i % len(WORDS)] for i in range(NUM_STREAMS)]
    assert all(reason in ("length", "stop") for _, reason in alone)
    assert_clean(server)


def test_ten_thousand_clients_that_leave(server):
    """Catches rows, pages, slots or table entries that a gone client keeps (F87)."""
    rng = random.Random(0)

    async def leave(client: aiohttp.ClientSession) -> bool:
        body = {
            "prompt": rng.choice(WORDS) * rng.randint(1, 20),
            "max_tokens": 500,
            "ignore_eos": True,
            "stream": rng.random() < 0.5,
            "n": rng.choice((1, 1, 2)),
        }
        if rng.random() < 0.1:
            body["regex"] = "[a-z ]{400}"
        try:
            async with asyncio.timeout(rng.uniform(0.01, 0.6)):
                async with client.post(server.url + "/v1/completions", json=body) as reply:
                    await reply.read()
        except TimeoutError:
            return True
        return False

    async def main() -> int:
        left = 0
        async with session() as client:
            for _ in range(NUM_ABORTS // AT_ONCE):
                left += sum(await asyncio.gather(*(leave(client) for _ in range(AT_ONCE))))
        return left

    assert asyncio.run(main()) > 0.99 * NUM_ABORTS
    assert_clean(server)
    aborted = [
        line
        for line in httpx.get(server.url + "/metrics").text.splitlines()
        if line.startswith("sglang:num_aborted_requests_total")
    ]
    assert float(aborted[0].split()[-1]) > 100


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
