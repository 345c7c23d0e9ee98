"""Chat messages to a prompt, with the Jinja template that comes with a checkpoint."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sglang.srt.managers.errors import RequestError
from sglang.srt.managers.tokenizer import Tokenizer


class _GenerationBlock(Extension):
    """`{% generation %}` marks training spans; its content is plain text when serving."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template.

    Raises: ValueError if `source` is not a Jinja template.
    """

    def __init__(self, source: str, *, special_tokens: dict[str, str]) -> None:
        self.source = source
        self._special_tokens = special_tokens
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template is not valid Jinja: {error}") from error

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: dict[str, Any] | None = None,
    ) -> str:
        """The prompt text. Raises: RequestError 400 with the reason for anything that fails."""
        values = {**self._special_tokens, **(extra or {})}
        values.update(messages=messages, tools=tools, documents=None)
        values["add_generation_prompt"] = add_generation_prompt and not continue_final_message
        try:
            text = self._template.render(values)
        except RecursionError as error:
            raise _failed("the messages are nested too deeply") from error
        except Exception as error:  # a template can raise anything; all of it is about the input
            raise _failed(str(error) or type(error).__name__) from error
        return _cut_after_final(text, messages) if continue_final_message else text


def load_chat_template(
    tokenizer: Tokenizer, *, override: str | None = None, name: str | None = None
) -> ChatTemplate | None:
    """The template of `--chat-template` (a file, or the text itself), else
    `chat_template.jinja` beside the tokenizer, else `chat_template` in tokenizer_config.json.

    None if there is none. Raises: ValueError if the one found cannot be used.
    """
    source = _override_source(override) if override else _checkpoint_source(tokenizer, name)
    if source is None:
        return None
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    texts = {key: tokenizer.config.get(key) for key in names}
    special = {
        key: text.get("content", "") if isinstance(text, dict) else text
        for key, text in texts.items()
        if text is not None
    }
    return ChatTemplate(source, special_tokens=special)


def _override_source(value: str) -> str:
    if "{{" in value or "{%" in value:
        return value
    path = Path(value)
    if not path.is_file():
        raise ValueError(f"--chat-template {value!r} is neither a file nor a Jinja template")
    return path.read_text(encoding="utf-8")


def _checkpoint_source(tokenizer: Tokenizer, name: str | None) -> str | None:
    file = tokenizer.path.parent / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = tokenizer.config.get("chat_template")
    if isinstance(found, list):
        named = {entry["name"]: entry["template"] for entry in found}
        return named.get(name or "default") or next(iter(named.values()), None)
    return found


def _cut_after_final(text: str, messages: list[dict[str, Any]]) -> str:
    """Drop everything that the template wrote after the last message's own content."""
    content = (messages[-1].get("content") or "").strip() if messages else ""
    at = text.rfind(content) if content else -1
    if at < 0:
        raise RequestError(
            "continue_final_message needs a last message with text that the chat template shows "
            "unchanged",
            param="continue_final_message",
        )
    return text[: at + len(content)]


def _failed(reason: str) -> RequestError:
    return RequestError(
        f"messages cannot be rendered with the chat template: {reason}",
        param="messages",
        code="chat_template_error",
    )


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
