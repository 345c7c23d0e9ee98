"""Reasoning and tool calls: the result never depends on how the text is cut into chunks."""

from __future__ import annotations

import json
import random

import pytest

from sglang.srt.parser.chat_output import ChatOutputParser
from sglang.srt.parser.events import CallArguments, CallStart, Content, Reasoning
from sglang.srt.parser.qwen3_coder import Qwen3CoderParser
from sglang.srt.parser.reasoning import ReasoningSplitter
from sglang.srt.parser.tool_calls import (
    PARSERS,
    ForcedCallsParser,
    QwenJsonParser,
    forced_calls_schema,
    parser_for_template,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit")

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "write",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "text": {"type": "string"},
                    "count": {"type": "integer"},
                    "ratio": {"type": "number"},
                    "force": {"type": "boolean"},
                    "tags": {"type": "array"},
                    "extra": {"type": "object"},
                    "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


def parameter(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


def call(name: str, *parameters: str) -> str:
    return f"<tool_call>\n<function={name}>\n{''.join(parameters)}</function>\n</tool_call>"


def collect(parser, pieces, *, complete=True):
    """(content, reasoning, [(name, arguments text)]) of an answer."""
    events = [event for piece in pieces for event in parser.push(piece)]
    events += parser.finish(complete=complete)
    content = "".join(e.text for e in events if isinstance(e, Content))
    reasoning = "".join(e.text for e in events if isinstance(e, Reasoning))
    calls: list[list[str]] = []
    for event in events:
        if isinstance(event, CallStart):
            assert event.index == len(calls)
            calls.append([event.name, ""])
        elif isinstance(event, CallArguments):
            calls[event.index][1] += event.text
    return content, reasoning, [tuple(c) for c in calls]


def cut(text: str, rng: random.Random) -> list[str]:
    pieces = []
    while text:
        size = rng.choice([1, 1, 2, 3, 5, 8, 20])
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def check_all_cuts(make, text, *, complete=True):
    """Result of the whole text; asserts that cut texts give the same."""
    want = collect(make(), [text], complete=complete)
    rng = random.Random(1)
    for pieces in [list(text), *(cut(text, rng) for _ in range(40))]:
        assert collect(make(), pieces, complete=complete) == want, pieces
    return want


ANSWERS = {
    "one call": (
        "Let me look.\n\n" + call("write", parameter("path", "a.txt"), parameter("count", "3")),
        "Let me look.",
        [("write", {"path": "a.txt", "count": 3})],
    ),
    "two calls": (
        call("write", parameter("path", "a")) + "\n" + call("now"),
        "",
        [("write", {"path": "a"}), ("now", {})],
    ),
    "types": (
        call(
            "write",
            parameter("ratio", "1.5"),
            parameter("force", "True"),
            parameter("tags", '["a", 1]'),
            parameter("extra", '{"k": null}'),
            parameter("maybe", "null"),
            parameter("count", "many"),
            parameter("unknown", "7"),
        ),
        "",
        [
            (
                "write",
                {
                    "ratio": 1.5,
                    "force": True,
                    "tags": ["a", 1],
                    "extra": {"k": None},
                    "maybe": None,
                    "count": "many",
                    "unknown": "7",
                },
            )
        ],
    ),
    "null-like texts": (
        call("write", parameter("path", "null"), parameter("text", "nullable")),
        "",
        [("write", {"path": None, "text": "nullable"})],
    ),
    "newlines and quotes": (
        call("write", parameter("text", '\n  say "hi"\\n\n\ttab\n')),
        "",
        [("write", {"text": '\n  say "hi"\\n\n\ttab\n'})],
    ),
    "empty value": (
        call("write", parameter("text", "")),
        "",
        [("write", {"text": ""})],
    ),
    "tags inside a value": (
        call(
            "write",
            parameter(
                "text", "use <tool_call> and <function=f>, </function> and </parameter> here"
            ),
            parameter("path", "</tool_call>"),
        ),
        "",
        [
            (
                "write",
                {
                    "text": "use <tool_call> and <function=f>, </function> and </parameter> here",
                    "path": "</tool_call>",
                },
            )
        ],
    ),
    "missing closing tags": (
        "<tool_call>\n<function=write>\n<parameter=path>\na\n<parameter=text>\nb\n</function>\n</tool_call>",
        "",
        [("write", {"path": "a", "text": "b"})],
    ),
    "missing function end": (
        "<tool_call>\n<function=write>\n<parameter=path>\na\n</parameter>\n</tool_call>",
        "",
        [("write", {"path": "a"})],
    ),
    "ends after the value": (
        "<tool_call>\n<function=write>\n<parameter=path>\na\n</parameter>",
        "",
        [("write", {"path": "a"})],
    ),
    "ends inside the value": (
        "<tool_call>\n<function=write>\n<parameter=path>\nabc",
        "",
        [("write", {"path": "abc"})],
    ),
    "no function": ("a <tool_call> is a tag", "a <tool_call> is a tag", []),
    "almost a tag": ("1 <tool 2 <tool_", "1 <tool 2 <tool_", []),
    "unicode": (
        call("write", parameter("text", "größe 世界 👩‍🚀")),
        "",
        [("write", {"text": "größe 世界 👩‍🚀"})],
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_tags_become_calls_at_every_cut(name):
    """Catches a parser that sees a tag only when it arrives in one piece (F82)."""
    text, content, calls = ANSWERS[name]
    got, _, found = check_all_cuts(lambda: Qwen3CoderParser(TOOLS), text)
    assert got.rstrip("\n") == content
    assert [(n, json.loads(arguments)) for n, arguments in found] == calls


def test_random_values_survive():
    """Catches a value that is cut or changed because of what it contains (F82)."""
    rng = random.Random(3)
    bits = [
        "<",
        ">",
        "/",
        "parameter",
        "</parameter",
        "<parameter=",
        "function",
        "\n",
        "x",
        '"',
        " ",
    ]
    for _ in range(200):
        value = "".join(rng.choice(bits) for _ in range(rng.randint(0, 12)))
        if "</parameter>" in value or "\n<parameter=" in value or value.strip() == "null":
            continue
        text = call("write", parameter("text", value), parameter("path", "p"))
        for pieces in ([text], list(text), cut(text, rng)):
            _, _, found = collect(Qwen3CoderParser(TOOLS), pieces)
            assert json.loads(found[0][1]) == {"text": value, "path": "p"}, value


def test_long_text_is_streamed_in_pieces():
    """Catches arguments that arrive only when the value is complete (F83)."""
    parser = Qwen3CoderParser(TOOLS)
    parser.push("<tool_call>\n<function=write>\n<parameter=text>\n")
    sizes = [
        sum(len(e.text) for e in parser.push("line of text\n") if isinstance(e, CallArguments))
        for _ in range(50)
    ]
    assert min(sizes) >= len("line of text")


def test_cut_off_call_stays_open():
    """Catches a call that looks whole although the model ran out of tokens."""
    parser = Qwen3CoderParser(TOOLS)
    _, _, calls = collect(
        parser, ["<tool_call>\n<function=write>\n<parameter=text>\nab"], complete=False
    )
    assert calls == [("write", '{"text": "ab')]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (
            'Ok.\n<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n</tool_call>',
            "Ok.",
            [("now", {"a": 1})],
        ),
        ('<tool_call>{"name": "now"}', "", [("now", {})]),
        ("<tool_call>no json</tool_call>", "<tool_call>no json</tool_call>", []),
    ],
)
def test_json_calls(text, content, calls):
    """Catches the older format read as text, or broken JSON that raises."""
    got, _, found = check_all_cuts(lambda: QwenJsonParser(TOOLS), text)
    assert got == content
    assert [(n, json.loads(arguments)) for n, arguments in found] == calls


SPLITS = {
    "in the prompt": (True, "I think.\n</think>\n\nYes.", "I think.", "Yes."),
    "written by the model": (None, "<think>\nI think.\n</think>\n\nYes.", "I think.", "Yes."),
    "doubled": (True, "<think>\nI think.</think>Yes.", "I think.", "Yes."),
    "switched off": (False, "a </think> b <think> c", "", "a </think> b <think> c"),
    "none": (None, "\nJust text.", "", "\nJust text."),
    "cut off": (True, "I think", "I think", ""),
    "empty": (True, "\n\n</think>\n\nYes.", "", "Yes."),
    "inner newlines": (True, "a\n\nb\n</think>\nc\n\nd", "a\n\nb", "c\n\nd"),
    "almost a tag": (True, "a </thin b", "a </thin b", ""),
}


@pytest.mark.parametrize("name", SPLITS)
def test_reasoning_is_split_at_every_cut(name):
    """Catches reasoning in the content or the reverse (F85)."""
    inside, text, reasoning, content = SPLITS[name]

    def make():
        return ChatOutputParser(splitter=ReasoningSplitter(inside=inside), tools=None)

    assert check_all_cuts(make, text) == (content, reasoning, [])


def test_tool_call_closes_reasoning():
    """Catches a call that is lost inside reasoning without its closing tag."""

    def make():
        return ChatOutputParser(
            splitter=ReasoningSplitter(inside=True), tools=Qwen3CoderParser(TOOLS)
        )

    text = "I should call.\n" + call("now")
    content, reasoning, calls = check_all_cuts(make, text)
    assert (content, reasoning, calls) == ("", "I should call.", [("now", "{}")])


@pytest.mark.parametrize(
    ("prompt", "state"),
    [("x<think>\n", "reasoning"), ("x<think>\n\n</think>\n\n", "text"), ("x", "start")],
)
def test_the_prompts_end_decides(prompt, state):
    """Catches a split that ignores whether thinking is on."""
    text = "a</think>b"
    parser = ChatOutputParser(splitter=ReasoningSplitter.for_prompt(prompt), tools=None)
    want = {"reasoning": ("b", "a"), "text": (text, ""), "start": (text, "")}[state]
    assert collect(parser, [text])[:2] == want


def test_reasoning_can_come_in_one_piece():
    """Catches stream_reasoning false that loses reasoning."""
    parser = ChatOutputParser(
        splitter=ReasoningSplitter(inside=True), tools=None, stream_reasoning=False
    )
    assert parser.push("ab") == []
    assert parser.push("c</think>d") == [Reasoning("abc"), Content("d")]


def test_forced_choice():
    """Catches a forced call with markup, or a schema that lets other tools through (F84)."""
    schema = forced_calls_schema(TOOLS, name="now")
    assert schema["maxItems"] == 1 and len(schema["items"]["anyOf"]) == 1
    text = '[{"name": "now", "parameters": {"a": 1}}]'
    content, _, calls = check_all_cuts(ForcedCallsParser, text)
    assert (content, calls) == ("", [("now", '{"a": 1}')])
    text = '[{"name": "say", "parameters": {"t": "a \\"}] \\\\", "u": [{}]}}, {"name":"now","parameters":{}}]'
    content, _, calls = check_all_cuts(ForcedCallsParser, text)
    assert (content, calls) == (
        "",
        [("say", '{"t": "a \\"}] \\\\", "u": [{}]}'), ("now", "{}")],
    )


@pytest.mark.parametrize("complete", [False, True])
def test_a_forced_call_that_is_cut_off_stays_a_call(complete):
    """Catches a call that a limit on tokens turns into text, which clients show to users."""
    text = '[{"name": "now", "parameters": {"a": "bcd"}}, {"name": "say", "parameters": {"t": 1}}]'
    for end in range(1, len(text)):
        parser = ForcedCallsParser()
        events = parser.push(text[:end]) + parser.finish(complete=complete)
        calls = [event.name for event in events if isinstance(event, CallStart)]
        assert calls == ["now", "say"][: text[:end].count('"parameters": {')]
        arguments = "".join(e.text for e in events if isinstance(e, CallArguments) and not e.index)
        assert '{"a": "bcd"}'.startswith(arguments)
        assert not any(isinstance(e, Content) for e in events) or (complete and not calls)
    parser = ForcedCallsParser()
    assert parser.push("no list") + parser.finish(complete=True) == [Content("no list")]


def test_forced_schema_keeps_references():
    """Catches `$ref` of a tool that points into another tool, or nowhere, once they are joined."""
    own = {"properties": {"x": {"$ref": "#/$defs/t"}}, "$defs": {"t": {"type": "integer"}}}
    tools = [{"function": {"name": name, "parameters": own}} for name in "ab"]
    schema = forced_calls_schema(tools, name=None, single=True)
    assert schema["maxItems"] == 1
    for at, call in enumerate(schema["items"]["anyOf"]):
        assert call["properties"]["parameters"] == {"$ref": f"#/$defs/{at}"}
        moved = schema["$defs"][str(at)]
        assert moved["properties"]["x"] == {"$ref": f"#/$defs/{at}/$defs/t"}
        assert moved["type"] == "object" and moved["$defs"] == own["$defs"]


def test_format_is_found_from_the_template():
    """Catches tools that are announced in one format and read in another."""
    assert parser_for_template("... <tool_call>\n<function=x> ...") == "qwen3_coder"
    assert parser_for_template('... <tool_call>\n{"name" ...') == "qwen25"
    assert parser_for_template("no tools") is None
    assert set(PARSERS) == {"qwen3_coder", "qwen25", "qwen"}


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
