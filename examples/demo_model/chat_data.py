"""Conversations for the short chat pass: question and answer pairs from the dialogue package, and
dialogues made from our own sentence patterns (writing on a subject, tools, small talk)."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from examples.demo_model.errors import DemoModelError
from examples.demo_model.tokenizer import load_chat_template

Message = dict[str, Any]

_DIALOGUE_FILES = (
    "ai", "computers", "food", "history", "literature", "money", "science",
    "sports", "tech_support", "trivia",
)  # fmt: skip
_UNWANTED = re.compile(
    r"\b(kill|killed|suicide|assassinat\w+|hitler|stupid|hate|murder\w*|die|dead|death|"
    r"drunk|beer|sex\w*)\b",
    re.IGNORECASE,
)
_SMALL_TALK = {
    "Hello": "Hello! How can I help you?",
    "Hi": "Hello! What would you like to talk about?",
    "Good morning": "Good morning! How can I help you?",
    "How are you?": "I am well, thank you. How are you?",
    "Who are you?": "I am a small demonstration model. I was trained on old books and manuals.",
    "What are you?": "I am a small language model that shows how this server works.",
    "What can you do?": "I can write short passages, answer simple questions and call tools.",
    "Thank you": "You are welcome.",
    "Thanks": "You are welcome!",
    "Goodbye": "Goodbye!",
    "What is your name?": "I have no name of my own; I am called the demo model.",
}
_SUBJECTS = (
    "the sea", "the king", "the queen", "love", "war", "peace", "the whale", "marriage", "money",
    "the people", "the government", "the law", "a database", "a table", "a function", "memory",
    "a file", "the house", "the night", "the morning", "friendship", "honour", "trade", "the ship",
    "a query", "an index", "a string", "a list", "the city", "the mountain", "the temple", "bread",
    "the army", "the Congress", "happiness", "a letter", "the garden", "music", "the theatre",
)  # fmt: skip
_WRITE_REQUESTS = (
    "Write a paragraph about {}.",
    "Tell me about {}.",
    "Please write something about {}.",
    "What can you say about {}?",
)
_CITIES = (
    "Paris", "London", "Rome", "Berlin", "Madrid", "Vienna", "Tokyo", "Cairo", "Oslo", "Athens",
    "Lisbon", "Dublin", "Prague", "Warsaw", "Boston", "Chicago", "Sydney", "Delhi", "Lima", "Bath",
)  # fmt: skip


def _tool(name: str, description: str, properties: dict[str, str]) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in properties.items()},
                "required": list(properties),
            },
        },
    }


TOOLS = {
    "get_weather": _tool("get_weather", "Current weather of a city", {"city": "string"}),
    "get_time": _tool("get_time", "Local time of a city", {"city": "string"}),
    "add": _tool("add", "Sum of two numbers", {"a": "integer", "b": "integer"}),
}


@dataclass(frozen=True)
class Example:
    """One conversation whose last message is the answer to learn."""

    messages: list[Message]
    thinking: bool
    tools: list[dict[str, Any]] = field(default_factory=list)

    def prompt_and_answer(self) -> tuple[str, str]:
        """Rendered conversation up to the answer, and the answer up to its turn end."""
        options = {"tools": self.tools or None, "enable_thinking": self.thinking}
        prompt = render(self.messages[:-1], add_generation_prompt=True, **options)
        full = render(self.messages, add_generation_prompt=False, **options)
        if not full.startswith(prompt):
            raise ValueError("the chat template renders a history that its prompt does not begin")
        return prompt, full[len(prompt) :]


@lru_cache(maxsize=1)
def _template() -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(load_chat_template())


def render(messages: list[Message], **options: Any) -> str:
    """Render as the Hugging Face tokenizer does."""
    return _template().render(messages=messages, **options)


def read_pairs(directory: Path) -> list[tuple[str, str]]:
    """Question and first answer of every usable dialogue; repeated pairs are dropped."""
    pairs: dict[tuple[str, str], None] = {}
    for name in _DIALOGUE_FILES:
        matches = sorted(directory.rglob(f"{name}.yml"))
        if not matches:
            raise DemoModelError(
                f"{name}.yml is missing below {directory}; delete that directory and fetch again"
            )
        text = matches[0].read_text(encoding="utf-8").split("conversations:", 1)[1]
        for block in re.split(r"^- - ", text, flags=re.MULTILINE)[1:]:
            turns = re.split(r"^  - ", block, flags=re.MULTILINE)
            if len(turns) < 2 or "|" in turns[1][:2]:
                continue
            question, answer = (re.sub(r"\s+", " ", t).strip().strip("'\"") for t in turns[:2])
            question, answer = question.replace("''", "'"), answer.replace("''", "'")
            if answer and not _UNWANTED.search(question + " " + answer):
                pairs[question[0].upper() + question[1:], answer] = None
    return list(pairs)


def build_examples(
    dialogue_directory: Path, paragraphs: list[str], rng: random.Random
) -> list[Example]:
    """All conversations in random order. ``paragraphs`` is prose to answer writing requests with."""
    examples: list[Example] = []
    pairs = read_pairs(dialogue_directory)
    for thinking in (False, True, False):
        examples += [_plain(q, a, thinking) for q, a in pairs]
    for _ in range(25):
        for question, answer in _SMALL_TALK.items():
            examples.append(_plain(question, answer, rng.random() < 0.5))
    examples += _writing(paragraphs, rng)
    examples += [_tool_request(rng) for _ in range(900)]
    examples += [_two_turns(pairs, rng) for _ in range(500)]
    rng.shuffle(examples)
    return examples


def _plain(question: str, answer: str, thinking: bool, system: str = "") -> Example:
    messages: list[Message] = [{"role": "user", "content": question}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    messages.append(_answer(answer, thinking, f"The user says: {question} I answer briefly."))
    return Example(messages, thinking)


def _answer(content: str, thinking: bool, thought: str, **extra: Any) -> Message:
    message: Message = {"role": "assistant", "content": content, **extra}
    if thinking:
        message["reasoning_content"] = thought
    return message


def _writing(paragraphs: list[str], rng: random.Random) -> list[Example]:
    found: list[Example] = []
    for subject in _SUBJECTS:
        word = re.compile(rf"\b{re.escape(subject.split()[-1])}s?\b", re.IGNORECASE)
        fitting = [p for p in paragraphs if len(word.findall(p)) > 1]
        rng.shuffle(fitting)
        for paragraph in fitting[:40]:
            request = rng.choice(_WRITE_REQUESTS).format(subject)
            thinking = rng.random() < 0.4
            thought = f"The user wants to read about {subject}. I write one paragraph."
            system = rng.choice(("", "", "You are a helpful assistant."))
            example = _plain(request, paragraph, thinking, system)
            if thinking:
                example.messages[-1]["reasoning_content"] = thought
            found.append(example)
    return found


def _two_turns(pairs: list[tuple[str, str]], rng: random.Random) -> Example:
    thinking = rng.random() < 0.5
    (first, reply), (second, answer) = rng.sample(pairs, 2)
    messages: list[Message] = [
        {"role": "user", "content": first},
        {"role": "assistant", "content": reply},
        {"role": "user", "content": second},
        _answer(answer, thinking, f"The user says: {second} I answer briefly."),
    ]
    return Example(messages, thinking)


def _tool_request(rng: random.Random) -> Example:
    name = rng.choice(list(TOOLS))
    arguments: dict[str, Any]
    if name == "add":
        arguments = {"a": rng.randrange(100), "b": rng.randrange(100)}
        question = f"What is {arguments['a']} plus {arguments['b']}?"
        result = str(arguments["a"] + arguments["b"])
        answer = f"The sum is {result}."
    else:
        city = rng.choice(_CITIES)
        arguments = {"city": city}
        if name == "get_weather":
            result = f"{rng.choice(('sunny', 'rainy', 'cloudy'))}, {rng.randrange(30)} degrees"
            question = rng.choice(("What is the weather in {}?", "Is it warm in {} today?"))
            answer = f"The weather in {city}: {result}."
        else:
            result = f"{rng.randrange(24):02d}:{rng.randrange(60):02d}"
            question = rng.choice(("What time is it in {}?", "Tell me the time in {}."))
            answer = f"It is {result} in {city}."
        question = question.format(city)
    thinking = rng.random() < 0.5
    call = {"function": {"name": name, "arguments": arguments}}
    thought = f"The user asks: {question} I call {name}."
    messages: list[Message] = [
        {"role": "user", "content": question},
        _answer("", thinking, thought, tool_calls=[call]),
    ]
    if rng.random() < 0.4:
        messages.append({"role": "tool", "content": result})
        messages.append(_answer(answer, thinking, "The function has answered. I report it."))
    offered = rng.sample(list(TOOLS.values()), rng.randrange(1, len(TOOLS) + 1))
    if TOOLS[name] not in offered:
        offered.append(TOOLS[name])
    return Example(messages, thinking, offered)
