"""Chat messages to a prompt: which template, what it sees, and how its failures read."""

from __future__ import annotations

import json

import pytest

from sglang.srt.entrypoints.openai.chat_prompt import check_tools, clean_messages, forced_choice
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.managers.errors import RequestError
from sglang.srt.managers.template import ChatTemplate, load_chat_template
from sglang.srt.managers.tokenizer import Tokenizer
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.front_end_case import write_front_end_model

register_cpu_ci(est_time=2, suite="unit")

USER = [{"role": "user", "content": "hé"}]


@pytest.fixture
def model(tmp_path):
    return write_front_end_model(tmp_path / "model")


def test_the_file_beside_the_tokenizer_wins(model):
    """Catches the older place being read although the newer one is there."""
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": "old"}))
    template = load_chat_template(Tokenizer(model))
    assert template.render(USER) == "<|im_start|>user\nhé<|im_end|>\n<|im_start|>assistant\n"
    (model / "chat_template.jinja").unlink()
    assert load_chat_template(Tokenizer(model)).render(USER) == "old"
    named = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert load_chat_template(Tokenizer(model)).render(USER) == "d"
    (model / "tokenizer_config.json").write_text("{}")
    assert load_chat_template(Tokenizer(model)) is None


def test_override(model, tmp_path):
    """Catches a flag that is ignored, or a bad path taken for a template."""
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages[0].content }}!")
    tokenizer = Tokenizer(model)
    assert load_chat_template(tokenizer, override=str(file)).render(USER) == "hé!"
    assert load_chat_template(tokenizer, override="{{ eos_token }}").render(USER) == "<|im_end|>"
    with pytest.raises(ValueError, match="--chat-template"):
        load_chat_template(tokenizer, override="/no/such/file")
    with pytest.raises(ValueError, match="not valid Jinja"):
        load_chat_template(tokenizer, override="{% if %}")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('no query') }}", "no query"),
        ("{{ messages[5].content.x.y }}", "has no element 5"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nested too deeply"),
    ],
    ids=["raised", "missing", "arithmetic", "sandbox", "mutation", "recursion"],
)
def test_any_failure_is_a_400_with_the_reason(source, reason):
    """Catches a template error that becomes a 500, and code that a template may not run (F91)."""
    with pytest.raises(RequestError, match=reason) as caught:
        ChatTemplate(source, special_tokens={}).render(USER)
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_environment():
    """Catches a missing extension or filter that real templates use."""
    source = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% break %}{% endfor %}{{ tools | tojson }}{{ strftime_now('%Y') | length }}"
        "{{ {'ü': 1} | tojson(indent=1) }}"
    )
    text = ChatTemplate(source, special_tokens={}).render(USER * 2, tools=[{"a": "<é>"}])
    assert text == 'hé[{"a": "<é>"}]4{\n "ü": 1\n}'


def test_continue_final_message(model):
    """Catches an end-of-turn, or a second assistant turn, after the text to continue."""
    template = load_chat_template(Tokenizer(model))
    messages = [*USER, {"role": "assistant", "content": "Once upon"}]
    text = template.render(messages, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nOnce upon")


def test_messages_are_cleaned():
    """Catches part lists, JSON arguments or nulls that a template cannot render."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    cleaned = clean_messages(
        [
            {"role": "developer", "content": parts, "name": None},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "r", "tool_call_id": "1"},
        ]
    )
    assert cleaned[0] == {"role": "system", "content": "ab"}
    assert cleaned[1]["content"] == ""
    assert cleaned[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert call["function"]["arguments"] == '{"x": 1}', "the client's message is not changed"
    with pytest.raises(RequestError, match="arguments of f are not JSON"):
        bad = {"function": {"name": "f", "arguments": "{"}}
        clean_messages([{"role": "assistant", "tool_calls": [bad]}])


def test_tool_choice():
    """Catches a choice that is taken for auto although it cannot be met."""
    tool = {"type": "function", "function": {"name": "f"}}

    def ask(choice, tools=(tool,)):
        return ChatCompletionRequest(messages=USER, tools=list(tools), tool_choice=choice)

    assert forced_choice(ask(None)) == forced_choice(ask("auto")) == (False, None)
    assert forced_choice(ask("required")) == (True, None)
    assert forced_choice(ask({"type": "function", "function": {"name": "f"}})) == (True, "f")
    assert check_tools(ask("none")) == [] and check_tools(ask("auto")) == [tool]
    for choice in ("any", {"function": {"name": "g"}}, {"function": "f"}, {}):
        with pytest.raises(RequestError, match="^tool_choice must be"):
            forced_choice(ask(choice))
    with pytest.raises(RequestError, match="^tool_choice must be"):
        forced_choice(ask("required", tools=()))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
