"""The OpenAI routes, through the openai client and by hand, over a scheduler without a model."""

from __future__ import annotations

import json

import httpx
import openai
import pytest

from sglang.srt.managers.tokenizer import Tokenizer
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.front_end_case import IM_END, FakeServer, write_front_end_model

register_cpu_ci(est_time=12, suite="e2e")

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    model = write_front_end_model(tmp_path_factory.mktemp("model"))
    flags = ("--served-model-name", "tiny", "--reasoning-parser", "qwen3")
    with FakeServer(model, *flags) as running:
        yield running.wait_ready()


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def events(server, path, body):
    """JSON events of a stream; asserts that [DONE] ends it."""
    with httpx.stream("POST", server.url + path, json=body, timeout=20) as reply:
        assert reply.status_code == 200, reply.read()
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in reply.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def test_models(client):
    """Catches a model list that clients and routers cannot read."""
    cards = client.models.list().data
    assert [(card.id, card.max_model_len) for card in cards] == [("tiny", 128)]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("abc", ["abca"]),
        (["ab", "c"], ["abab", "cccc"]),
        ([97, 98], ["abab"]),
        ([[97], [98]], ["aaaa", "bbbb"]),
    ],
    ids=["text", "texts", "ids", "lists of ids"],
)
def test_completion_prompt_forms(client, prompt, texts):
    """Catches choices out of order, and usage that forgets a prompt."""
    reply = client.completions.create(model="tiny", prompt=prompt, max_tokens=4)
    assert [choice.text for choice in reply.choices] == texts
    assert [choice.index for choice in reply.choices] == list(range(len(texts)))
    assert {choice.finish_reason for choice in reply.choices} == {"length"}
    assert reply.usage.completion_tokens == 4 * len(texts)


def test_stream_equals_whole_answer(client, server):
    """Catches deltas or usage that differ from the whole answer (F99)."""
    body = {"model": "tiny", "prompt": "Grüße, 世界\n", "max_tokens": 30, "stop": ["界\n"]}
    whole = client.completions.create(**body)
    assert whole.choices[0].text == "Grüße, 世"
    assert (whole.choices[0].finish_reason, whole.choices[0].matched_stop) == ("stop", "界\n")
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(server, "/v1/completions", body)
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1])
    assert text == whole.choices[0].text
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole.usage.model_dump(
        include={"prompt_tokens", "completion_tokens", "total_tokens"}
    ) | {"prompt_tokens_details": {"cached_tokens": 1}}
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"


def test_chat_stream_shape(server):
    """Catches a null role, a missing first role, or usage where none was asked for."""
    body = {"messages": USER, "max_tokens": 5, "stream": True}
    chunks = events(server, "/v1/chat/completions", body)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all("role" not in delta for delta in deltas[1:])
    assert all("usage" not in chunk for chunk in chunks)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"
    assert "".join(delta.get("content", "") for delta in deltas) == "user"
    body |= {"stream_options": {"continuous_usage_stats": True}}
    counts = [c["usage"]["completion_tokens"] for c in events(server, "/v1/chat/completions", body)]
    assert counts == sorted(counts) and counts[-1] == 5


def test_chat_logprobs_have_bytes(client):
    """Catches log probabilities in another shape than OpenAI's."""
    reply = client.chat.completions.create(
        model="tiny", messages=USER, max_tokens=3, logprobs=True, top_logprobs=2
    )
    entry = reply.choices[0].logprobs.content[0]
    assert (entry.token, entry.bytes, entry.logprob) == (
        "<|im_start|>",
        list(b"<|im_start|>"),
        -0.5,
    )
    assert len(entry.top_logprobs) == 2
    assert len(reply.choices[0].logprobs.content) == 3


def test_completion_echo_and_prompt_logprobs(client):
    """Catches echo without the prompt's log probabilities, and offsets that drift."""
    reply = client.completions.create(
        model="tiny", prompt="abc", max_tokens=2, echo=True, logprobs=1
    )
    found = reply.choices[0].logprobs
    assert reply.choices[0].text == "abcab"
    assert found.tokens == ["a", "b", "c", "a", "b"]
    assert found.token_logprobs == [None, -1.0, -1.0, -0.5, -0.5]
    assert found.text_offset == [0, 1, 2, 3, 4]
    assert found.top_logprobs[0] is None and found.top_logprobs[3] == {"a": -0.5}


def test_scoring_without_output(client):
    """Catches a token that is delivered although none was asked for (F61)."""
    reply = client.completions.create(
        model="tiny", prompt="abc", max_tokens=0, echo=True, logprobs=0
    )
    assert reply.choices[0].text == "abc"
    assert reply.usage.completion_tokens == 0
    assert reply.choices[0].logprobs.token_logprobs == [None, -1.0, -1.0]
    with pytest.raises(openai.BadRequestError, match="max_tokens 0 is for scoring"):
        client.completions.create(model="tiny", prompt="abc", max_tokens=0)


def test_n_counts_the_prompt_once(client, server):
    """Catches usage that multiplies the prompt, or equal seeds for all choices (F97)."""
    reply = client.completions.create(model="tiny", prompt="abcdef", max_tokens=2, n=3, seed=7)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (6, 6)
    assert reply.usage.prompt_tokens_details.cached_tokens == 1
    seen = server.counts()["seen"][-3:]
    assert [params["sampling_seed"] for params in seen] == [7, 8, 9]
    chunks = events(
        server, "/v1/completions", {"prompt": "ab", "n": 2, "max_tokens": 3, "stream": True}
    )
    texts = {0: "", 1: ""}
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == {0: "aba", 1: "aba"}


def test_options_arrive_at_the_scheduler(client, server):
    """Catches an option that is accepted and then ignored, and defaults that override a request."""
    client.chat.completions.create(
        model="tiny",
        messages=USER,
        max_completion_tokens=4,
        temperature=0.5,
        presence_penalty=0.25,
        seed=3,
        logit_bias={"97": 2},
        response_format={"type": "json_object"},
        extra_body={"min_tokens": 2, "top_k": 7, "stop_token_ids": [5], "min_p": 0.25},
    )
    seen = server.counts()["seen"][-1]
    assert seen["max_new_tokens"] == 4 and seen["min_new_tokens"] == 2
    assert (seen["temperature"], seen["top_k"], seen["min_p"]) == (0.5, 7, 0.25)
    assert (seen["presence_penalty"], seen["sampling_seed"]) == (0.25, 3)
    assert seen["logit_bias"] == {"97": 2.0}
    assert json.loads(seen["json_schema"]) == {"type": "object"}
    assert seen["stop_token_ids"] == [5, 256, 258]
    client.completions.create(
        model="tiny", prompt="a", max_tokens=1, extra_body={"ignore_eos": True}
    )
    seen = server.counts()["seen"][-1]
    assert seen["top_k"] == 20, "the model's generation config fills what is unset"
    assert seen.get("stop_token_ids", []) == []


ANSWER = (
    "hm\n</think>\n\nOk.\n<tool_call>\n<function=say>\n<parameter=text>\nhé\n</parameter>\n"
    "</function>\n</tool_call>"
)
SAY = {
    "type": "function",
    "function": {
        "name": "say",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
    },
}


@pytest.mark.parametrize("width", [1, 7])
def test_reasoning_and_tools(tmp_path, width):
    """Catches parsers that are not wired to the route, in whole answers and streams, and a stop
    string that is cut before the split or after it (F86)."""
    model = write_front_end_model(tmp_path)
    script = [*Tokenizer(model).encode(ANSWER), IM_END]
    options = {"script": script, "width": width, "max_req_input_len": 400}
    with FakeServer(model, "--reasoning-parser", "qwen3", options=options) as server:
        server.wait_ready()
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        body = {
            "model": "tiny",
            "messages": USER,
            "tools": [SAY],
            "extra_body": {"chat_template_kwargs": {"enable_thinking": True}},
        }
        choice = client.chat.completions.create(**body).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Ok."
        assert choice.message.reasoning_content == "hm"
        (call,) = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("say", {"text": "hé"})
        content = reasoning = arguments = ""
        for chunk in client.chat.completions.create(**body, stream=True):
            delta = chunk.choices[0].delta
            content += delta.content or ""
            reasoning += (delta.model_extra or {}).get("reasoning_content") or ""
            for piece in delta.tool_calls or ():
                arguments += piece.function.arguments or ""
        assert (content, reasoning) == ("Ok.", "hm")
        assert json.loads(arguments) == {"text": "hé"}
        assert chunk.choices[0].finish_reason == "tool_calls"
        body["stop"] = ["say>", "k."]
        whole = client.chat.completions.create(**body).choices[0]
        assert (whole.message.content, whole.finish_reason) == ("O", "stop")
        assert (whole.message.reasoning_content, whole.matched_stop) == ("hm", "k.")
        deltas = [c.choices[0].delta for c in client.chat.completions.create(**body, stream=True)]
        assert "".join(delta.content or "" for delta in deltas) == "O"
        body.pop("stop")
        forced = body | {"tool_choice": {"type": "function", "function": {"name": "say"}}}
        client.chat.completions.create(**forced)
        assert "json_schema" in server.counts()["seen"][-1]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"stop": 5}, "stop"),
        ({"stop_regex": "a"}, "stop_regex"),
        ({"logit_bias": {"9999": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1.0": 1}}, "logit_bias"),
        ({"logit_bias": {" 1": 1}}, "logit_bias"),
        ({"logit_bias": {"1_0": 1}}, "logit_bias"),
        ({"logit_bias": {"\u0663": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1, "01": 2}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"min_tokens": 9, "max_tokens": 2}, "min_tokens"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 99}, "logprobs"),
        ({"guided_json": {}}, "guided_json"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [280]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": None}, "prompt"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_bad_completion_is_a_400_that_names_the_field(server, change, param):
    """Catches a 5xx, a hang, or a message without the field (F88, F89)."""
    reply = httpx.post(server.url + "/v1/completions", json={"prompt": "a"} | change)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert set(error) == {"message", "type", "param", "code"}
    assert param in error["message"] and error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "change",
    [
        {"messages": []},
        {"messages": "hi"},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "king", "content": "a"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
        {"messages": [], "tools": [{"type": "x"}]},
        {"tool_choice": "required"},
        {"tools": [{"type": "function", "function": {}}]},
        {"top_logprobs": 2},
        {"continue_final_message": True, "messages": [{"role": "user", "content": ""}]},
    ],
    ids=json.dumps,
)
def test_bad_chat_is_a_400(server, change):
    """Catches a template or message fault that becomes a 500 (F88, F91)."""
    reply = httpx.post(server.url + "/v1/chat/completions", json={"messages": USER} | change)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b'{"prompt": "\xff"}',
        b'{"prompt": "a", "temperature": NaN}',
        b"[" * 5000,
        b'{"metadata": ' + b"[" * 300 + b"]" * 300 + b"}",
    ],
    ids=[
        "empty",
        "open",
        "list",
        "number",
        "not utf-8",
        "NaN",
        "nested",
        "too deep to write again",
    ],
)
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/generate", "/tokenize", "/abort_request"]
)
def test_broken_bodies_are_a_400_on_every_route(server, path, body):
    """Catches a body that breaks a route (F88)."""
    reply = httpx.post(server.url + path, content=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize("count", [62, 63, 64, 65, 5000])
def test_prompts_around_the_limit(server, count):
    """Catches an off-by-one at the longest prompt, or one that hangs (F90); the fake takes 63."""
    reply = httpx.post(
        server.url + "/v1/completions", json={"prompt": [97] * count, "max_tokens": 9}
    )
    if count <= 63:
        assert reply.status_code == 200
        assert reply.json()["usage"]["completion_tokens"] == min(9, 64 - count)
        return
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
    assert str(count) in error["message"] and "63" in error["message"]


@pytest.mark.parametrize(("priority", "status"), [(-8, 400), (-9, 503)])
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_by_the_scheduler_is_an_http_error(server, priority, status, stream):
    """Catches a refusal that becomes an empty 200."""
    body = {"prompt": "a", "priority": priority, "stream": stream}
    reply = httpx.post(server.url + "/v1/completions", json=body)
    assert reply.status_code == status
    assert reply.json()["error"]["param"] == (None if status == 503 else "json_schema")
    if status == 400:
        body |= {"response_format": {"type": "json_object"}}
        error = httpx.post(server.url + "/v1/completions", json=body).json()["error"]
        assert error["param"] == "response_format"
        assert error["message"].startswith("response_format is not supported")
    assert ("retry-after" in reply.headers) == (status == 503)


def test_unknown_paths_and_methods(server):
    """Catches an HTML or empty error."""
    reply = httpx.get(server.url + "/nothing")
    assert reply.status_code == 404 and reply.json()["error"]["type"] == "not_found_error"
    assert httpx.get(server.url + "/v1/completions").status_code in (404, 405)


def test_head_answers_like_get_without_the_body(server):
    """Catches a 405 that load balancers take for a dead server; HEAD must not flush either."""
    paths = [
        "/", "/health", "/ready", "/v1/models", "/server_info", "/model_info", "/metrics",
        "/version", "/get_load", "/v1/loads", "/openapi.json",
    ]  # fmt: skip
    for path in paths:
        get, head = httpx.get(server.url + path), httpx.head(server.url + path)
        assert (head.status_code, head.content) == (get.status_code, b""), path
        assert head.headers.get("content-type") == get.headers.get("content-type"), path
    assert httpx.head(server.url + "/v1/models/none-such").status_code == 404
    assert httpx.head(server.url + "/flush_cache").status_code == 405
    assert "head" not in server.get("/openapi.json")["paths"]["/health"]


def test_openapi_describes_the_bodies(server):
    """Catches routes without a schema, which a fuzzer or a client generator needs."""
    description = server.get("/openapi.json")
    body = description["paths"]["/v1/completions"]["post"]["requestBody"]
    name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    assert "max_tokens" in description["components"]["schemas"][name]["properties"]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
