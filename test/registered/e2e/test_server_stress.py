"""Many clients, rude clients and nonsense; the server must stay as it was."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time

import aiohttp
import httpx
import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.front_end_case import FakeServer, write_front_end_model

register_cpu_ci(est_time=20, suite="e2e")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    model = write_front_end_model(tmp_path_factory.mktemp("model"))
    options = {"step_s": 0.01, "max_req_input_len": 100}
    with FakeServer(model, "--served-model-name", "tiny", options=options) as running:
        yield running.wait_ready()


def assert_clean(server: FakeServer) -> None:
    """Nothing runs, nothing leaked, and a request is answered."""
    end = time.monotonic() + 5
    while server.counts()["num_running"] and time.monotonic() < end:
        time.sleep(0.05)
    counts = server.counts()
    assert counts["num_running"] == 0
    assert server.status("/health") == 200
    reply = httpx.post(server.url + "/v1/completions", json={"prompt": "ab", "max_tokens": 4})
    assert reply.json()["choices"][0]["text"] == "abab"


async def stream_text(session: aiohttp.ClientSession, url: str, prompt: str, tokens: int) -> str:
    body = {"prompt": prompt, "max_tokens": tokens, "stream": True}
    text = ""
    async with session.post(url, json=body) as reply:
        async for line in reply.content:
            if line.startswith(b"data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
    return text


def test_many_simultaneous_streams(server):
    """Catches a limit on connections, or text in the wrong stream."""

    async def main() -> list[str]:
        timeout = aiohttp.ClientTimeout(total=60)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            url = server.url + "/v1/completions"
            return await asyncio.gather(
                *(stream_text(session, url, chr(97 + i % 26), 8) for i in range(400))
            )

    assert asyncio.run(main()) == [chr(97 + i % 26) * 8 for i in range(400)]
    assert_clean(server)


def test_many_aborts(server):
    """Catches a request that stays in a table after its client has left."""
    before = server.counts()

    async def leave(session: aiohttp.ClientSession, rng: random.Random) -> None:
        body = {"prompt": "ab", "max_tokens": 60, "stream": rng.random() < 0.5}
        with pytest.raises(asyncio.TimeoutError):
            async with asyncio.timeout(rng.uniform(0.01, 0.2)):
                async with session.post(server.url + "/v1/completions", json=body) as reply:
                    await reply.read()

    async def main() -> None:
        rng = random.Random(0)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            for _ in range(5):
                await asyncio.gather(*(leave(session, rng) for _ in range(100)))

    asyncio.run(main())
    assert_clean(server)
    after = server.counts()
    started = after["requests"] - before["requests"] - 1
    assert after["aborts"] - before["aborts"] == started > 20


def test_uploads_that_stop_half_way(server):
    """Catches a traceback, or a request that waits for ever, when a body never ends."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head + b'{"prompt": ')
    assert_clean(server)
    assert "Traceback" not in server.log()


def test_slow_reader_holds_up_nobody(server):
    """Catches a client that reads nothing and blocks the loop or the scheduler."""
    data = json.dumps({"prompt": "ab" * 20, "max_tokens": 60, "stream": True, "n": 8}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        lazy.connect(("127.0.0.1", server.port))
        lazy.sendall(head.encode() + data)
        time.sleep(0.2)
        begin = time.monotonic()
        body = {"prompt": "a", "max_tokens": 5}
        assert httpx.post(server.url + "/v1/completions", json=body).status_code == 200
        assert time.monotonic() - begin < 2
    assert_clean(server)


def test_long_texts_do_not_stop_the_others(server):
    """Catches a text that is encoded although it cannot fit, or that holds up every stream."""
    texts = ("ab " * 30_000, "é" * 12_000_000)
    for text in texts:
        begin = time.monotonic()
        reply = httpx.post(server.url + "/v1/completions", json={"prompt": text}, timeout=20)
        assert reply.status_code == 400
        assert reply.json()["error"]["code"] == "context_length_exceeded"
        assert time.monotonic() - begin < 5
    assert_clean(server)


VALUES = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**70, 1e308, -0.5, "", "a", "\u0000", "é" * 300),
    *([], [[]], [None], ["a", 1], [-1], [1, 2], [[1], [2]], {}, {"a": {}}, {"1": 1}, {"x": 1e99}),
]
FIELDS = {
    "/v1/completions": """prompt max_tokens temperature top_p top_k min_p n stream stream_options stop
        stop_token_ids seed presence_penalty frequency_penalty repetition_penalty logit_bias logprobs
        echo min_tokens ignore_eos skip_special_tokens response_format regex ebnf json_schema rid
        priority user model stop_regex no_stop_trim spaces_between_special_tokens metadata store
        best_of suffix return_token_ids""".split(),
    "/v1/chat/completions": """messages tools tool_choice max_completion_tokens logprobs top_logprobs
        chat_template_kwargs reasoning_effort continue_final_message add_generation_prompt
        separate_reasoning stream_reasoning parallel_tool_calls stream n stop metadata""".split(),
    "/generate": """text input_ids sampling_params rid return_logprob logprob_start_len
        top_logprobs_num token_ids_logprob return_text_in_logprobs return_state_digest
        return_step_lengths stream priority""".split(),
    "/v1/responses": """input instructions max_output_tokens stream temperature top_p tools tool_choice
        parallel_tool_calls text reasoning previous_response_id metadata store user include
        truncation""".split(),
    "/v1/messages": """messages max_tokens system stream temperature top_p top_k stop_sequences tools
        tool_choice thinking metadata""".split(),
    "/v1/messages/count_tokens": "messages system tools tool_choice thinking".split(),
    "/flush_cache": ["anything"],
    "/tokenize": "prompt messages tools add_special_tokens chat_template_kwargs".split(),
    "/detokenize": "tokens skip_special_tokens".split(),
    "/abort_request": "rid abort_all".split(),
}
GOOD = {
    "/v1/completions": {"prompt": "ab", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/generate": {"text": "ab", "sampling_params": {"max_new_tokens": 2}},
    "/v1/responses": {"input": "ab", "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
    "/flush_cache": {},
    "/tokenize": {"prompt": "ab"},
    "/detokenize": {"tokens": [97]},
    "/abort_request": {"rid": "x"},
}


@pytest.mark.parametrize("path", FIELDS)
def test_nonsense_never_breaks_the_server(server, path):
    """Catches a wrongly typed or extreme value that becomes a 5xx or a hang (F88)."""
    with httpx.Client(base_url=server.url, timeout=20) as client:
        for at, field in enumerate(FIELDS[path]):
            for value in VALUES[at % 3 :: 3]:
                content = json.dumps(GOOD[path] | {field: value})
                reply = client.post(path, content=content)
                assert reply.status_code in (200, 400), (field, value, reply.text)
                if reply.status_code == 400:
                    assert reply.json()["error"]["message"], (field, value)
    assert_clean(server)


def test_the_fuzz_covers_every_route(server):
    """Catches a new POST route that nobody throws nonsense at."""
    paths = server.get("/openapi.json")["paths"]
    posts = {path for path, methods in paths.items() if "post" in methods}
    assert posts - {"/v1/tokenize", "/v1/detokenize"} == set(FIELDS)


@pytest.mark.parametrize("path", [p for p in FIELDS if p != "/flush_cache"])
def test_bodies_that_are_no_json(server, path):
    """Catches bytes that reach a parser which does not expect them (F88)."""
    bodies = [
        *(b"", b"{", b"[]", b"null", b"1", b'"a"', b"\xff\xfe", b'{"a": NaN}', b"{}" * 2),
        *(b"[" * 100_000, b'{"a":' * 100_000, b'{"prompt": "\xed\xa0\x80"}', b"\x00" * 1000),
    ]
    for content in bodies:
        reply = httpx.post(server.url + path, content=content, timeout=20)
        assert reply.status_code == 400 and reply.json()["error"]["message"], content[:20]
    assert_clean(server)


def test_nested_messages_do_not_break_the_server(server):
    """Catches a recursion error from data that JSON lets through."""
    deep: object = "x"
    for _ in range(900):
        deep = {"a": deep}
    for body in (
        {"messages": [{"role": "user", "content": "a", "extra": deep}]},
        {"messages": [{"role": "user", "content": deep}]},
        {"messages": [{"role": "user", "content": "a"}], "tools": [{"function": deep}]},
        {
            "messages": [{"role": "user", "content": "a"}],
            "tools": [{"function": {"name": "f", "parameters": deep}}],
            "max_tokens": 1,
        },
    ):
        reply = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=20)
        assert reply.status_code in (200, 400), reply.text
    assert_clean(server)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
