"""Chat messages as the template wants them, and what a tool choice asks for."""

from __future__ import annotations

import copy
from typing import Any

import orjson

from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.managers.errors import RequestError

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def clean_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with text content only and tool-call arguments as objects.

    Raises: RequestError 400 naming the message at fault.
    """
    if not messages:
        raise RequestError("messages is empty: at least one message is needed", param="messages")
    return [_clean_message(message, index) for index, message in enumerate(messages)]


def _clean_message(message: dict[str, Any], index: int) -> dict[str, Any]:
    where = f"messages[{index}]"
    role = message.get("role")
    if role not in _ROLES:
        raise RequestError(
            f"{where}.role must be one of {', '.join(_ROLES)}, got {role!r}", param="messages"
        )
    clean = {key: value for key, value in message.items() if value is not None}
    clean["role"] = "system" if role == "developer" else role
    clean["content"] = _text_of(message.get("content"), where)
    calls = message.get("tool_calls")
    if calls is not None:
        clean["tool_calls"] = _clean_calls(calls, where)
    elif message.get("content") is None and role != "assistant":
        raise RequestError(f"{where}.content is missing", param="messages")
    return clean


def _text_of(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where}.content must be a text or a list of parts", param="messages")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                f"{where}.content has a part of type {kind!r}; this server takes text only",
                param="messages",
            )
        texts.append(part["text"])
    return "".join(texts)


def _clean_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Templates iterate over arguments, clients send them as JSON text."""
    if not isinstance(calls, list):
        raise RequestError(f"{where}.tool_calls must be a list", param="messages")
    cleaned = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(
                f"{where}.tool_calls needs function.name in each call", param="messages"
            )
        call = copy.deepcopy(call)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                call["function"]["arguments"] = orjson.loads(arguments) if arguments else {}
            except orjson.JSONDecodeError as error:
                raise RequestError(
                    f"{where}.tool_calls: arguments of {function['name']} are not JSON: {error}",
                    param="messages",
                ) from error
        cleaned.append(call)
    return cleaned


def check_tools(request: ChatCompletionRequest) -> list[dict[str, Any]]:
    """The tools of a request, [] if there are none or none may be used.

    Raises: RequestError 400.
    """
    tools = request.tools or []
    for index, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type", "function") != "function" or not isinstance(function, dict):
            raise RequestError(f"tools[{index}] must be a function", param="tools")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise RequestError(f"tools[{index}].function.name is missing", param="tools")
        if not isinstance(function.get("parameters") or {}, dict):
            raise RequestError(
                f"tools[{index}].function.parameters must be a schema", param="tools"
            )
    return [] if request.tool_choice == "none" else tools


def forced_choice(request: ChatCompletionRequest) -> tuple[bool, str | None]:
    """(must call, the function it must be). Raises: RequestError 400."""
    choice = request.tool_choice
    if choice is None or choice in ("auto", "none"):
        return False, None
    names = [tool["function"]["name"] for tool in request.tools or []]
    if choice == "required" and names:
        return True, None
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if name is not None and name in names:
        return True, name
    raise RequestError(
        f"tool_choice must be none, auto, required (with tools) or name one of the tools "
        f"{names}, got {choice!r}",
        param="tool_choice",
    )
