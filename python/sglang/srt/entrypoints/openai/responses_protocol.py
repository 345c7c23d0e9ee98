"""Bodies of /v1/responses as chat requests; nothing is stored."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import orjson

from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.managers.errors import RequestError

SPELLING = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Fields of the chat route that this one names otherwise."""
_ROLES = ("user", "assistant", "system", "developer")
_FORMATS = ("text", "json_object", "json_schema")
_TEXT_PARTS = ("input_text", "output_text", "text")


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """POST /v1/responses. `store`, `metadata`, `user`, `include` and `truncation` have no effect."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    previous_response_id: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    user: str | None = None
    include: list[str] | None = None
    truncation: str | None = None


def to_chat(request: ResponsesRequest) -> ChatCompletionRequest:
    """The same request for the chat route. Raises: RequestError 400 naming the field."""
    if request.previous_response_id is not None:
        raise RequestError(
            "previous_response_id is not supported: this server stores no responses; send the "
            "whole conversation as input",
            param="previous_response_id",
        )
    if not request.input:
        raise RequestError("input is empty: at least one item is needed", param="input")
    messages: list[dict[str, Any]] = []
    if request.instructions is not None:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        messages.append({"role": "user", "content": request.input})
    else:
        for index, item in enumerate(request.input):
            _add_item(messages, item, f"input[{index}]")
    chat = ChatCompletionRequest(
        messages=messages,
        stream=request.stream,
        max_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        response_format=_response_format(request.text),
        tool_choice=_tool_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
    )
    if request.tools:
        chat.tools = [_tool(tool, index) for index, tool in enumerate(request.tools)]
    if request.reasoning is not None and request.reasoning.get("effort") is not None:
        chat.reasoning_effort = str(request.reasoning["effort"])
    return chat


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role not in _ROLES:
            raise RequestError(
                f"{where}.role must be one of {', '.join(_ROLES)}, got {role!r}", param="input"
            )
        messages.append({"role": role, "content": _text(item.get("content"), where)})
    elif kind == "function_call":
        function = _called(item, where)
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    elif kind == "function_call_output":
        output = {"role": "tool", "tool_call_id": item.get("call_id")}
        messages.append({**output, "content": _text(item.get("output"), where)})
    elif kind != "reasoning":
        raise RequestError(
            f"{where} is of type {kind!r}; this server takes message, function_call, "
            "function_call_output and reasoning",
            param="input",
        )


def _called(item: dict[str, Any], where: str) -> dict[str, str]:
    """Name and arguments of a call that was made earlier."""
    name, arguments = item.get("name"), item.get("arguments") or "{}"
    if not isinstance(name, str) or not name:
        raise RequestError(f"{where}.name must be the name of a function", param="input")
    try:
        value = orjson.loads(arguments)
    except (orjson.JSONDecodeError, TypeError) as error:
        raise RequestError(f"{where}.arguments is not JSON: {error}", param="input") from error
    if not isinstance(value, dict):
        raise RequestError(f"{where}.arguments must be a JSON object in a text", param="input")
    return {"name": name, "arguments": arguments}


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, dict)
        and part.get("type") in _TEXT_PARTS
        and isinstance(part.get("text"), str)
        for part in content
    ):
        return "".join(part["text"] for part in content)
    raise RequestError(f"{where} must be a text or a list of text parts", param="input")


def _response_format(text: dict[str, Any] | None) -> dict[str, Any] | None:
    given = (text or {}).get("format")
    if given is None:
        return None
    kind = given.get("type") if isinstance(given, dict) else None
    if kind not in _FORMATS:
        raise RequestError(
            f"text.format.type must be one of {', '.join(_FORMATS)}, got {kind!r}",
            param="text.format",
        )
    if kind != "json_schema":
        return given
    if not isinstance(given.get("schema"), dict | bool):
        raise RequestError("text.format.schema must be a JSON schema", param="text.format")
    return {"type": kind, "json_schema": given}


def _tool(tool: dict[str, Any], index: int) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise RequestError(
            f"tools[{index}].type must be function, got {tool.get('type')!r}", param="tools"
        )
    if not isinstance(tool.get("name"), str) or not tool["name"]:
        raise RequestError(f"tools[{index}].name is missing", param="tools")
    if not isinstance(tool.get("parameters") or {}, dict):
        raise RequestError(f"tools[{index}].parameters must be a schema", param="tools")
    names = ("name", "description", "parameters")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict) and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice
