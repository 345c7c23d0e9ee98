"""The whole server on the bundled model: HTTP, scheduler, speculation, memory together."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import socket
import time

import httpx
import openai
import pytest

import sglang
from sglang.bundled import resolve_model_path
from sglang.srt.managers.tokenizer import Tokenizer
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.front_end_case import FakeServer, is_alive

register_cpu_ci(est_time=60, suite="e2e")

LOSSLESS = ("--speculative-algorithm", "NEXTN", "--enable-linear-lossless-verify")
QUESTION = [{"role": "user", "content": "What is the weather?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Paris", "Oslo"]}, "day": {"$ref": "#/$defs/day"}},
                "required": ["city", "day"],
                "additionalProperties": False,
                "$defs": {"day": {"enum": ["today", "tomorrow"]}},
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"properties": {}}}},
]
PROMPTS = [
    "The captain looked at the sea and",
    "Call me",
    "In Python, a list is",
    "It is a truth universally acknowledged",
    "Grüße, 世界",
    "\n\n",
]
GREEDY = {"max_tokens": 40, "temperature": 0}
TOKENIZER = Tokenizer(resolve_model_path("demo"))


@pytest.fixture(scope="module")
def server():
    flags = ("--served-model-name", "demo", "--max-total-tokens", "8192", *LOSSLESS)
    flags += ("--reasoning-parser", "qwen3")
    with FakeServer("demo", *flags, module="sglang.launch_server") as running:
        yield running.wait_ready(60)


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def plain_texts():
    """Greedy texts of the offline engine without speculation, one request at a time."""
    params = {"max_new_tokens": 40, "temperature": 0}
    with sglang.Engine("demo", disable_radix_cache=True) as engine:
        return [engine.generate(prompt, params)["text"] for prompt in PROMPTS]


def num_running(server):
    load = server.get("/v1/loads")["loads"][0]
    return (
        server.get("/server_info")["internal_states"][0]["num_running_reqs"]
        + load["num_waiting_reqs"]
    )


def wait_idle(server, timeout_s=5.0):
    end = time.monotonic() + timeout_s
    while num_running(server) and time.monotonic() < end:
        time.sleep(0.05)
    assert num_running(server) == 0


def test_served_equals_offline(client, plain_texts):
    """Catches text that HTTP, batching, the prefix cache or lossless speculation changes."""

    def ask(prompt):
        return client.completions.create(model="demo", prompt=prompt, **GREEDY).choices[0].text

    for _ in range(2):  # cold, then from the prefix cache
        with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool:
            assert list(pool.map(ask, PROMPTS)) == plain_texts


@pytest.mark.parametrize("stop", [None, [" the"], ["\n", "e "]], ids=str)
def test_stream_equals_whole(client, stop):
    """Catches deltas or usage that differ from the whole answer (F57, F63, F80, F99)."""
    for prompt in PROMPTS:
        body = {"model": "demo", "prompt": prompt, "stop": stop, **GREEDY}
        whole = client.completions.create(**body)
        chunks = list(
            client.completions.create(**body, stream=True, stream_options={"include_usage": True})
        )
        text = "".join(chunk.choices[0].text for chunk in chunks[:-1])
        assert text == whole.choices[0].text
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        assert not any(word in text for word in stop or ())


def test_length_is_exact(server):
    """Catches an accepted block that runs past the limit (F59)."""
    for count in range(1, 11):
        body = {"prompt": PROMPTS[0], "max_tokens": count, "ignore_eos": True}
        reply = httpx.post(server.url + "/v1/completions", json=body | {"return_token_ids": True})
        choice = reply.json()["choices"][0]
        assert len(choice["token_ids"]) == count and choice["finish_reason"] == "length"


def test_second_turn_comes_from_the_cache(client):
    """Catches a prefix that is never found again, or a wrong answer from it."""
    text = "It was the best of times, it was the worst of times. " * 12
    first = client.completions.create(model="demo", prompt=text, **GREEDY)
    longer = text + first.choices[0].text
    warm = client.completions.create(model="demo", prompt=longer, **GREEDY)
    assert warm.usage.prompt_tokens_details.cached_tokens > 0
    httpx.post(str(client.base_url).replace("/v1/", "/flush_cache"))
    cold = client.completions.create(model="demo", prompt=longer, **GREEDY)
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert cold.choices[0].text == warm.choices[0].text


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_clients_that_leave_free_everything(server, stream):
    """Catches rows, pages or slots that a gone client keeps, with speculation on (F87)."""
    body = {"prompt": PROMPTS[0], "max_tokens": 3000, "ignore_eos": True, "n": 2, "stream": stream}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head.encode() + data)
            end = time.monotonic() + 5
            while num_running(server) < 2 and time.monotonic() < end:
                time.sleep(0.02)
            assert num_running(server) == 2
        wait_idle(server)
    assert httpx.post(server.url + "/flush_cache").status_code == 200
    info = server.get("/server_info")["internal_states"][0]
    assert info["num_running_reqs"] == 0


def test_sampling_with_a_seed_repeats(client):
    """Catches a random stream that requests share (seed), and its control: no seed differs."""
    body = {"model": "demo", "prompt": "Once", "max_tokens": 24, "temperature": 1.0}
    texts = {client.completions.create(**body, seed=5).choices[0].text for _ in range(3)}
    assert len(texts) == 1
    texts = {client.completions.create(**body).choices[0].text for _ in range(3)}
    assert len(texts) > 1


def test_logprobs_describe_the_tokens(client):
    """Catches log probabilities of other positions: greedy takes the top one."""
    reply = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=12,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    for entry in reply.choices[0].logprobs.content:
        assert entry.token == entry.top_logprobs[0].token
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob)


def thinking(is_on):
    """Options of a chat that thinks or does not; a bias keeps the thoughts short."""
    extra = {"chat_template_kwargs": {"enable_thinking": is_on}}
    return {"extra_body": {**extra, "logit_bias": {"4068": 12}} if is_on else extra}


@pytest.mark.parametrize("is_on", [False, True], ids=["plain", "thinking"])
def test_response_format_is_kept(client, is_on):
    """Catches content that is no JSON of the schema, with and without thinking (F77, F78)."""
    schema = {
        "type": "object",
        "properties": {"degrees": {"type": "integer", "minimum": -40, "maximum": 60}},
        "required": ["degrees"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema}}
    reply = client.chat.completions.create(
        model="demo", messages=QUESTION, max_tokens=200, response_format=form, **thinking(is_on)
    ).choices[0]
    assert reply.finish_reason == "stop"
    assert -40 <= json.loads(reply.message.content)["degrees"] <= 60
    assert bool(reply.message.reasoning_content) == is_on


@pytest.mark.parametrize("is_on", [False, True], ids=["plain", "thinking"])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str
)
def test_forced_tool_choice_gives_a_valid_call(client, choice, is_on):
    """Catches a call with markup, with arguments outside its schema, or cut differently when
    streamed (F84)."""
    body = {
        "model": "demo",
        "messages": QUESTION,
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 250,
        "temperature": 0,
        **thinking(is_on),
    }
    whole = client.chat.completions.create(**body).choices[0]
    assert whole.finish_reason == "tool_calls" and not whole.message.content
    (call,) = whole.message.tool_calls
    arguments = json.loads(call.function.arguments)
    if call.function.name == "weather":
        assert arguments["city"] in ("Paris", "Oslo") and arguments["day"] in ("today", "tomorrow")
    else:
        assert choice == "required" and isinstance(arguments, dict)
    pieces = [
        delta
        for chunk in client.chat.completions.create(**body, stream=True)
        for delta in chunk.choices[0].delta.tool_calls or ()
    ]
    assert pieces[0].function.name == call.function.name
    assert "".join(p.function.arguments or "" for p in pieces) == call.function.arguments


def test_a_forced_call_that_is_cut_off_stays_a_call(client):
    """Catches a limit on tokens that turns a call into text."""
    body = {"model": "demo", "messages": QUESTION, "tools": TOOLS, "tool_choice": "required"}
    body |= {"temperature": 0, **thinking(False)}
    whole = client.chat.completions.create(**body, max_tokens=250).choices[0].message.tool_calls[0]
    seen = set()
    for limit in range(1, 60, 3):
        cut = client.chat.completions.create(**body, max_tokens=limit).choices[0]
        if cut.finish_reason != "length":
            break
        assert not cut.message.content
        for call in (cut.message.tool_calls or [])[:1]:
            assert call.function.name == whole.function.name
            assert whole.function.arguments.startswith(call.function.arguments)
            seen.add(call.function.arguments)
    assert len(seen) > 1


def test_response_format_beside_tools_leaves_room_for_calls(client):
    """Catches a format that forbids every call, and calls that bring text outside both with them."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {
        "type": "object",
        "properties": {"degrees": {"type": "integer", "minimum": -40, "maximum": 60}},
        "required": ["degrees"], "additionalProperties": False}}}  # fmt: skip
    body = {"model": "demo", "messages": QUESTION, "tools": TOOLS, "response_format": form}
    body |= {"temperature": 0, "max_tokens": 250}
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    brace, tag = ({"logit_bias": {str(token): 60}} for token in (TOKENIZER.encode("{")[0], 4069))
    reply = client.chat.completions.create(**body, extra_body=extra | brace).choices[0].message
    assert set(json.loads(reply.content)) == {"degrees"} and not reply.tool_calls
    # A bias towards the tag must bring a call's beginning, where the format alone forbids it.
    begun = {**body, "max_tokens": 1, "extra_body": extra | tag | {"return_token_ids": True}}
    ids = [
        client.chat.completions.create(**begun | more).choices[0].token_ids
        for more in ({}, {"tool_choice": "none"})
    ]
    assert ids[0] == [4069] and ids[1] != [4069]


def test_accepted_tokens_past_the_end_are_not_counted(server):
    """Catches a last step counted in full: figures of short answers would be too good."""
    past = 0
    for limit in range(1, 9):
        params = {"max_new_tokens": limit, "temperature": 0, "ignore_eos": True}
        body = {"text": PROMPTS[0], "sampling_params": params}
        meta = httpx.post(server.url + "/generate", json=body, timeout=60).json()["meta_info"]
        if limit == 1:
            assert meta["spec_verify_ct"] == 0 and "spec_accept_token_num" not in meta
            continue
        assert meta["spec_accept_token_num"] == limit - 1
        past += meta["spec_accept_length"] * meta["spec_verify_ct"] > limit - 1
    assert past, "no step went past the end, so nothing was tested"


@pytest.mark.parametrize(("key", "status"), [("50", 200), ("S", 400)])
def test_native_logit_bias(server, key, status):
    """Catches ids that stay the texts that JSON makes of them."""
    params = {"max_new_tokens": 4, "temperature": 0, "logit_bias": {key: 100}}
    body = {"text": "a", "sampling_params": params}
    reply = httpx.post(server.url + "/generate", json=body, timeout=60)
    assert reply.status_code == status
    if status == 200:
        assert reply.json()["output_ids"] == [50] * 4
    else:
        assert reply.json()["error"]["param"] == "logit_bias"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}},
         "response_format"),
        ({"regex": "("}, "regex"),
        ({"ebnf": "start: nothing"}, "ebnf"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"not": {}}}}],
          "tool_choice": "required"}, "tool_choice"),
        ({"regex": "a", "ebnf": 'start: "a"'}, "ebnf"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_constraint_is_a_400_that_names_it(server, options, param, stream):
    """Catches a constraint that is silently ignored, or a stream that begins before it is read."""
    body = {"messages": QUESTION, "max_tokens": 5, "stream": stream, **options}
    reply = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=60)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tools", [[], [{"type": "function", "name": "now", "parameters": {}}]])
def test_a_bad_format_of_a_response_is_named_as_the_route_names_it(server, tools, stream):
    """Catches chat's or llguidance's names where the scheduler refuses, with and without calls beside."""
    form = {"type": "json_schema", "name": "x", "schema": {"type": "no"}}
    body = {"input": "hi", "text": {"format": form}, "tools": tools, "stream": stream}
    reply = httpx.post(server.url + "/v1/responses", json=body, timeout=60)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "text.format")
    assert error["message"].startswith("text.format: ")


def test_a_forced_call_of_a_response_that_is_cut_off_stays_a_call(server):
    """Catches arguments that become a message once max_output_tokens ends them."""
    tool = {"type": "function", **TOOLS[0]["function"]}
    body = {"input": "What is the weather?", "tools": [tool], "tool_choice": "required"}
    body |= {"temperature": 0, "reasoning": {"effort": "none"}}
    kinds = set()
    for limit in range(4, 40, 6):
        reply = httpx.post(
            server.url + "/v1/responses", json=body | {"max_output_tokens": limit}, timeout=60
        ).json()
        if reply["status"] == "completed":
            break
        assert reply["incomplete_details"] == {"reason": "max_output_tokens"}
        kinds |= {(item["type"], item["status"]) for item in reply["output"]}
    assert kinds == {("function_call", "incomplete")}


def test_sizes_that_serve_nobody_end_the_start_with_one_sentence():
    """Catches a traceback where the operator needs the flag and the way out."""
    flags = ("--max-total-tokens", "1")
    with FakeServer("demo", *flags, module="sglang.launch_server") as server:
        assert server.process.wait(60) == 1
        log = server.log()
    assert "--max-total-tokens 1 holds no request" in log and "raise it" in log
    assert "Traceback" not in log


def test_hard_kill_leaves_no_scheduler():
    """Catches a scheduler that outlives its server (F95)."""
    with FakeServer("demo", module="sglang.launch_server") as server:
        server.wait_ready(60)
        (child,) = server.children()
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        end = time.monotonic() + 5
        while is_alive(child) and time.monotonic() < end:
            time.sleep(0.05)
        assert not is_alive(child)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
