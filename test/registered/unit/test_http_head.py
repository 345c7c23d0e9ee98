"""Heads of requests that never end, without a server's model.

Mistakes caught: a header that grows in memory for as long as a client sends it, and a limit that counts
bodies, or the heads of a connection together.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
import uvicorn

from sglang.srt.entrypoints.http_head import MAX_HEAD_BYTES, BoundedHeadProtocol
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit")

GET = b"GET / HTTP/1.1\r\nHost: x\r\n"


async def app(scope, receive, send):
    """Answers with the length of the body."""
    assert scope["type"] == "http"
    length, more = 0, True
    while more:
        message = await receive()
        length, more = length + len(message.get("body", b"")), message.get("more_body", False)
    body = f"got {length}".encode()
    size = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [size]})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    config = uvicorn.Config(
        app, http=BoundedHeadProtocol, lifespan="off", port=0, log_level="error"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        thread.join(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join()


def exchange(port: int, *pieces: bytes) -> bytes:
    """Send the pieces one after the other; return all that is answered until the server closes."""

    async def talk() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.02)
            return await asyncio.wait_for(reader.read(), 10)
        finally:
            writer.close()

    return asyncio.run(talk())


def test_a_head_without_end_is_refused(port):
    """Catches a server that keeps 300 MB of one header and joins them anew with each piece."""
    part = b"a" * (MAX_HEAD_BYTES // 2)
    answer = exchange(port, GET + b"X: ", part, part, b"a")
    assert answer.startswith(b"HTTP/1.1 400 ") and str(MAX_HEAD_BYTES).encode() in answer
    end = b"\r\nConnection: close\r\n\r\n"
    assert exchange(port, GET + b"X: ", part, end).startswith(b"HTTP/1.1 200 ")


def test_bodies_and_earlier_heads_do_not_count(port):
    """Catches a limit that a large prompt, or the many requests of one connection, would reach."""
    size = 5 * MAX_HEAD_BYTES
    post = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size
    half, header = b"b" * (size // 2), b"Y: " + b"c" * (MAX_HEAD_BYTES // 2) + b"\r\n"
    # The second head begins in the chunk that ends a body, and goes on in another.
    pieces = [post + half, half + GET + header, b"\r\n"] + [GET + header + b"\r\n"] * 3
    answer = exchange(port, *pieces, GET + b"Connection: close\r\n\r\n")
    assert answer.count(b"HTTP/1.1 200 OK") == 6, answer[-300:]
    assert b"got %d" % size in answer


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
