"""The anthropic package's common calls over the bundled model."""

from __future__ import annotations

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.front_end_case import FakeServer

register_cpu_ci(est_time=20, suite="e2e")

anthropic = pytest.importorskip("anthropic", reason="the anthropic package is not installed")

QUESTION = [{"role": "user", "content": "What is the weather?"}]
GREEDY = {"extra_body": {"temperature": 0}}
TOOL = {
    "name": "weather",
    "description": "The weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def server():
    flags = ("--speculative-algorithm", "NEXTN", "--enable-linear-lossless-verify")
    flags += ("--max-total-tokens", "4096", "--reasoning-parser", "qwen3", "--api-key", "secret")
    with FakeServer("demo", *flags, module="sglang.launch_server") as running:
        yield running.wait_ready(60)


@pytest.fixture(scope="module")
def client(server):
    return anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0)


def create(client, **options):
    body = {"model": "demo", "max_tokens": 60, "messages": QUESTION, **GREEDY}
    return client.messages.create(**body | options)


def test_message_and_stream_agree(client):
    """Catches events that the package cannot put together, or usage that differs."""
    whole = create(client, system="Be brief.")
    assert whole.role == "assistant" and whole.stop_reason in ("end_turn", "max_tokens")
    body = {"model": "demo", "max_tokens": 60, "messages": QUESTION, **GREEDY}
    with client.messages.stream(**body, system="Be brief.") as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert text == "".join(block.text for block in whole.content if block.type == "text")
    assert last.stop_reason == whole.stop_reason
    assert last.usage.output_tokens == whole.usage.output_tokens > 0
    count = client.messages.count_tokens(model="demo", messages=QUESTION, system="Be brief.")
    assert count.input_tokens == (
        whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    )


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}], ids=str)
def test_forced_tool_use_and_its_result(client, choice):
    """Catches a forced call that is no tool_use block, and a result that cannot be sent back."""
    choice = {**choice, "disable_parallel_tool_use": True}
    reply = create(client, tools=[TOOL], tool_choice=choice, thinking={"type": "disabled"})
    assert reply.stop_reason == "tool_use"
    (call,) = [block for block in reply.content if block.type == "tool_use"]
    assert call.name == "weather" and call.input["city"] in ("Paris", "Oslo")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "12 degrees"}
    turns = [
        *QUESTION,
        {"role": "assistant", "content": [call.model_dump()]},
        {"role": "user", "content": [result]},
    ]
    assert create(client, messages=turns, tools=[TOOL]).usage.output_tokens > 0


@pytest.mark.parametrize(("kind", "thinks"), [("enabled", 1), ("adaptive", 1), ("disabled", 0)])
def test_thinking_is_on_unless_disabled(client, kind, thinks):
    """Catches a kind that the clients send and that silently switches thinking off."""
    reply = create(client, thinking={"type": kind})
    assert [block.type for block in reply.content].count("thinking") == thinks


def test_an_unknown_kind_of_thinking_is_refused(client):
    with pytest.raises(anthropic.BadRequestError, match=r"thinking.type must be .* got 'some'"):
        create(client, thinking={"type": "some"})


def test_stop_sequence(client):
    free = "".join(block.text for block in create(client).content if block.type == "text")
    word = free.split()[1]
    reply = create(client, stop_sequences=[word])
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", word)


def test_errors_have_their_classes(server, client):
    """Catches an error body that the package cannot read."""
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        create(client, max_tokens=0)
    stranger = anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError):
        create(stranger)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
