"""Bodies of the Anthropic routes as chat requests."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import orjson

from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.managers.errors import RequestError

SPELLING = {"stop": "stop_sequences"}
"""Fields of the chat route that this one names otherwise."""


class MessagesRequest(msgspec.Struct, kw_only=True):
    """POST /v1/messages. `metadata` has no effect."""

    messages: list[dict[str, Any]]
    max_tokens: Annotated[int, msgspec.Meta(ge=1)]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens."""

    messages: list[dict[str, Any]]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None


def to_chat(request: MessagesRequest | CountTokensRequest) -> ChatCompletionRequest:
    """The same request for the chat route. Raises: RequestError 400 naming the field."""
    messages: list[dict[str, Any]] = []
    if request.system is not None:
        messages.append({"role": "system", "content": _text(request.system, "system")})
    for index, message in enumerate(request.messages):
        messages += _chat_messages(message, f"messages[{index}]")
    chat = ChatCompletionRequest(messages=messages)
    if request.tools:
        chat.tools = [_tool(tool, index) for index, tool in enumerate(request.tools)]
    chat.tool_choice = _tool_choice(request.tool_choice)
    if request.tool_choice is not None and request.tool_choice.get("disable_parallel_tool_use"):
        chat.parallel_tool_calls = False
    if request.thinking is not None:
        chat.chat_template_kwargs = {"enable_thinking": _thinks(request.thinking)}
    if isinstance(request, MessagesRequest):
        chat.max_tokens = request.max_tokens
        chat.stop = request.stop_sequences
        chat.temperature = request.temperature
        chat.top_p = request.top_p
        chat.top_k = request.top_k
        chat.stream = request.stream
    return chat


def _thinks(thinking: dict[str, Any]) -> bool:
    kind = thinking.get("type")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise RequestError(
            f"thinking.type must be enabled, adaptive or disabled, got {kind!r}", param="thinking"
        )
    return kind != "disabled"


def _chat_messages(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """A message; tool results in it become messages of their own, before it."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise RequestError(
            f"{where}.role must be user or assistant, got {role!r}", param="messages"
        )
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise RequestError(f"{where}.content must be a text or a list of blocks", param="messages")
    results, texts, thoughts, calls = [], [], [], []
    for block in content:
        kind = block.get("type")
        if kind == "text" and isinstance(block.get("text"), str):
            texts.append(block["text"])
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind == "tool_use" and isinstance(block.get("name"), str):
            arguments = orjson.dumps(block.get("input") or {}).decode()
            function = {"name": block["name"], "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            results.append(
                {
                    "role": "tool",
                    "tool_call_id": block.get("tool_use_id"),
                    "content": _text(block.get("content") or "", where),
                }
            )
        else:
            raise RequestError(
                f"{where}.content has a block of type {kind!r}; this server takes text, "
                "thinking, tool_use and tool_result",
                param="messages",
            )
    own: dict[str, Any] = {"role": role, "content": "".join(texts)}
    if thoughts:
        own["reasoning_content"] = "".join(thoughts)
    if calls:
        own["tool_calls"] = calls
    return [*results, own] if texts or thoughts or calls or not results else results


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(block, dict) and isinstance(block.get("text"), str) for block in content
    ):
        return "".join(block["text"] for block in content)
    raise RequestError(
        f"{where} must be a text or a list of text blocks", param=where.split("[")[0]
    )


def _tool(tool: dict[str, Any], index: int) -> dict[str, Any]:
    if not isinstance(tool.get("name"), str) or tool.get("type", "custom") != "custom":
        raise RequestError(f"tools[{index}] must have a name and no built-in type", param="tools")
    function = {"name": tool["name"], "parameters": tool.get("input_schema")}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _tool_choice(choice: dict[str, Any] | None) -> str | dict[str, Any] | None:
    if choice is None:
        return None
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    simple = {"auto": "auto", "any": "required", "none": "none"}
    if kind not in simple:
        raise RequestError(
            f"tool_choice.type must be auto, any, tool or none, got {kind!r}", param="tool_choice"
        )
    return simple[kind]
