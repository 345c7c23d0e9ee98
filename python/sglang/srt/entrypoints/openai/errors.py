"""Errors in OpenAI's shape, on every route."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi.responses import Response

from sglang.srt.managers.errors import RequestError


def error_object(error: RequestError) -> dict[str, Any]:
    """`{"error": {message, type, param, code}}`."""
    return {
        "error": {
            "message": error.message,
            "type": error.error_type,
            "param": error.param,
            "code": error.code or str(error.status),
        }
    }


def error_response(error: RequestError) -> Response:
    """The HTTP reply of an error."""
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(
        orjson.dumps(error_object(error)),
        status_code=error.status,
        media_type="application/json",
        headers=headers,
    )


def error_event(error: RequestError) -> bytes:
    """The error as an event of a stream that has begun."""
    return b"data: " + orjson.dumps(error_object(error)) + b"\n\n"
