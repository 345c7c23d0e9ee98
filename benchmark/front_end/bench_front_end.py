"""What the front end costs: CPU per streamed chunk, and time to first token that HTTP adds.

The scheduler is a fake that answers at once, so everything measured is the front end's:

    python benchmark/front_end/bench_front_end.py --streams 256 --tokens 50
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from sglang.test.front_end_case import FakeServer, write_front_end_model

CPU_GOAL_MS = 0.3
FIRST_TOKEN_GOAL_MS = 10.0
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello world", "ignore_eos": True},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "hello world"}],
        "ignore_eos": True,
    },
    "/generate": {"text": "hello world"},
}


async def read_stream(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> int:
    """Number of events of one stream."""
    count = 0
    async with session.post(url, json=body) as reply:
        assert reply.status == 200, await reply.text()
        async for line in reply.content:
            count += line.startswith(b"data: ")
    return count


async def run_streams(server: FakeServer, path: str, *, streams: int, tokens: int) -> float:
    """CPU milliseconds of the front-end process per event."""
    body = ROUTES[path] | {"stream": True}
    if path == "/generate":
        body["sampling_params"] = {"max_new_tokens": tokens, "ignore_eos": True}
    else:
        body["max_tokens"] = tokens
    process = psutil.Process(server.process.pid)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        await read_stream(session, server.url + path, body)
        before = sum(process.cpu_times()[:2])
        counts = await asyncio.gather(
            *(read_stream(session, server.url + path, body) for _ in range(streams))
        )
        used_s = sum(process.cpu_times()[:2]) - before
    return 1000 * used_s / sum(counts)


async def first_token_ms(server: FakeServer, *, repeats: int) -> list[float]:
    """Milliseconds from a request to its first event, one request at a time."""
    body = ROUTES["/v1/completions"] | {"stream": True, "max_tokens": 2}
    found = []
    async with aiohttp.ClientSession() as session:
        for _ in range(repeats):
            begin = time.perf_counter()
            async with session.post(server.url + "/v1/completions", json=body) as reply:
                await reply.content.readline()
                found.append(1000 * (time.perf_counter() - begin))
                await reply.read()
    return found[1:]


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    options = {"step_s": args.step_ms / 1000, "max_req_input_len": 4000}
    with tempfile.TemporaryDirectory() as folder:
        model = write_front_end_model(Path(folder))
        with FakeServer(model, options=options) as server:
            await asyncio.to_thread(server.wait_ready)
            cpu_ms = {
                path: [
                    await run_streams(server, path, streams=args.streams, tokens=args.tokens)
                    for _ in range(args.repeats)
                ]
                for path in ROUTES
            }
        with FakeServer(model, options={"max_req_input_len": 4000}) as server:
            await asyncio.to_thread(server.wait_ready)
            first_ms = await first_token_ms(server, repeats=50)
    return {"cpu_ms_per_chunk": cpu_ms, "first_token_ms": first_ms}


def main() -> int:
    """Print a table; 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=50)
    parser.add_argument("--step-ms", type=float, default=100.0, help="time of a fake step")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    args = parser.parse_args()
    result = asyncio.run(measure(args))
    if args.json:
        print(json.dumps(result))
    ok = True
    for path, values in result["cpu_ms_per_chunk"].items():
        middle = statistics.median(values)
        ok = ok and middle <= CPU_GOAL_MS
        if not args.json:
            spread = f"{min(values):.3f}..{max(values):.3f}"
            print(f"{path:<22} {middle:.3f} ms CPU per chunk ({spread}), goal {CPU_GOAL_MS}")
    first = result["first_token_ms"]
    ok = ok and statistics.median(first) <= FIRST_TOKEN_GOAL_MS
    if not args.json:
        print(
            f"first token            {statistics.median(first):.2f} ms median, {max(first):.2f} "
            f"largest of {len(first)}, goal {FIRST_TOKEN_GOAL_MS:g}"
        )
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
