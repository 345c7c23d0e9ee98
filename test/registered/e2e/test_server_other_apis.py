"""/v1/messages and /v1/responses for text, reasoning and tool calls."""

from __future__ import annotations

import json

import httpx
import openai
import pytest

from sglang.srt.managers.tokenizer import Tokenizer
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.front_end_case import IM_END, FakeServer, write_front_end_model

register_cpu_ci(est_time=8, suite="e2e")

ANSWER = (
    "<think>\nhm\n</think>\n\nOk.\n<tool_call>\n<function=say>\n<parameter=text>\nhé\n</parameter>\n"
    "</function>\n</tool_call>"
)
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}}
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    model = write_front_end_model(tmp_path_factory.mktemp("model"))
    script = [*Tokenizer(model).encode(ANSWER), IM_END]
    options = {"script": script, "width": 2, "max_req_input_len": 800}
    flags = ("--reasoning-parser", "qwen3", "--served-model-name", "tiny")
    with FakeServer(model, *flags, options=options) as running:
        yield running.wait_ready()


def messages(server, **body):
    return httpx.post(server.url + "/v1/messages", json={"max_tokens": 200, **body})


def named_events(reply):
    """(name, data) of each event; asserts that both agree."""
    found = []
    for block in reply.text.strip().split("\n\n"):
        name, data = block.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        found.append(value)
    return found


TOOLS = [{"name": "say", "description": "say it", "input_schema": SCHEMA}]


def test_messages_whole(server):
    """Catches blocks, stop reason or usage in another shape than Anthropic's."""
    reply = messages(server, messages=USER, system="Be brief.", tools=TOOLS).json()
    thinking, text, call = reply["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "hm")
    assert text == {"type": "text", "text": "Ok."}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "say", {"text": "hé"})
    assert (reply["type"], reply["role"], reply["stop_reason"]) == (
        "message",
        "assistant",
        "tool_use",
    )
    usage = reply["usage"]
    assert usage["cache_read_input_tokens"] == 1 and usage["output_tokens"] > 50
    cut = messages(server, messages=USER, max_tokens=3).json()
    assert cut["stop_reason"] == "max_tokens"
    stopped = messages(server, messages=USER, stop_sequences=["k."]).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "k.")
    assert stopped["content"][-1]["text"] == "O"


def test_messages_stream_adds_up(server):
    """Catches deltas that do not add up to the whole message, or blocks left open."""
    whole = messages(server, messages=USER, tools=TOOLS).json()
    events = named_events(messages(server, messages=USER, tools=TOOLS, stream=True))
    assert [e["type"] for e in events[:2]] == ["message_start", "content_block_start"]
    assert [e["type"] for e in events[-3:]] == [
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    blocks, texts = [], []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"]["type"])
            texts.append("")
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            texts[event["index"]] += next(v for k, v in delta.items() if k != "type")
    assert blocks == [block["type"] for block in whole["content"]]
    assert texts[:2] == ["hm", "Ok."] and json.loads(texts[2]) == {"text": "hé"}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert events[-2]["usage"] == whole["usage"]


def test_messages_history_and_count(server):
    """Catches tool results or reasoning that a second turn loses."""
    history = [
        *USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "Ok."},
                {"type": "tool_use", "id": "1", "name": "say", "input": {"text": "x"}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "1", "content": "done"}],
        },
    ]
    url = server.url + "/v1/messages/count_tokens"
    short = httpx.post(url, json={"messages": USER}).json()["input_tokens"]
    long = httpx.post(url, json={"messages": history, "system": "s"}).json()["input_tokens"]
    assert 0 < short < long
    reply = messages(server, messages=history, system="s").json()
    assert reply["usage"]["input_tokens"] + reply["usage"]["cache_read_input_tokens"] == long


@pytest.mark.parametrize(
    "change",
    [
        {"messages": [{"role": "system", "content": "a"}]},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        {"messages": []},
        {"max_tokens": 0},
        {"temperature": -1},
        {"tool_choice": {"type": "some"}},
        {"tools": [{"type": "web_search", "name": "x"}]},
        {"mcp_servers": [1]},
    ],
    ids=json.dumps,
)
def test_messages_errors_have_anthropics_shape(server, change):
    """Catches OpenAI's error shape on Anthropic's route, and ignored options."""
    reply = messages(server, **({"messages": USER} | change))
    error = reply.json()
    assert (reply.status_code, error["type"]) == (400, "error")
    assert error["error"]["type"] == "invalid_request_error" and error["error"]["message"]


RESPONSE_TOOLS = [{"type": "function", "name": "say", "parameters": SCHEMA}]


def test_responses(server):
    """Catches items that the openai client cannot read, whole or streamed."""
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    body = {"model": "tiny", "input": "hi", "instructions": "Be brief.", "tools": RESPONSE_TOOLS}
    whole = client.responses.create(**body)
    assert whole.status == "completed" and whole.output_text == "Ok."
    kinds = [item.type for item in whole.output]
    assert kinds == ["reasoning", "message", "function_call"]
    assert json.loads(whole.output[2].arguments) == {"text": "hé"}
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    events = list(client.responses.create(**body, stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert events[0].type == "response.created" and events[-1].type == "response.completed"
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    arguments = "".join(
        e.delta for e in events if e.type == "response.function_call_arguments.delta"
    )
    assert text == "Ok." and json.loads(arguments) == {"text": "hé"}
    final = events[-1].response
    assert [item.type for item in final.output] == kinds
    assert final.usage.model_dump() == whole.usage.model_dump()
    cut = client.responses.create(model="tiny", input="hi", max_output_tokens=3)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_responses_history(server):
    """Catches items of an earlier turn that are dropped or refused."""
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "1", "name": "say", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "done"},
    ]
    reply = httpx.post(server.url + "/v1/responses", json={"input": items})
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"previous_response_id": "x"}, "previous_response_id"),
        ({"input": [{"type": "image"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"conversation": "x"}, "conversation"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": "x" * 999}, "input"),
        ({"input": [{"role": "king", "content": "a"}]}, "input"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{"}]}, "input"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "[]"}]}, "input"),
        ({"input": [{"type": "function_call"}]}, "input"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "function", "name": "f", "parameters": 3}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": "xml"}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "schema": 3}}}, "text.format"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 3}, "top_p"),
    ],
    ids=lambda value: str(value)[:70],
)
def test_responses_errors_name_the_field(server, change, param):
    """Catches an option that is silently ignored, and one that is named as the chat route names it."""
    reply = httpx.post(server.url + "/v1/responses", json={"input": "hi"} | change)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    words = ("messages", "max_tokens ", "response_format", "stop_sequences", "json_schema:")
    assert param in error["message"] and not any(word in error["message"] for word in words)


def test_a_fault_in_the_template_is_told_in_the_routes_own_words(server):
    """Catches chat's name in what the template, and Anthropic's stop strings in what sampling refuses."""
    body = {"input": [{"role": "developer", "content": "x"}], "max_output_tokens": 1}
    assert httpx.post(server.url + "/v1/responses", json=body).status_code == 200
    message = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    reply = httpx.post(server.url + "/v1/messages", json=message | {"stop_sequences": [""]})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith("stop_sequences has an empty string")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
