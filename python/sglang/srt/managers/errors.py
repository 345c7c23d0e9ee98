"""Errors that a user of the server sees; `entrypoints` gives them their HTTP form."""

from __future__ import annotations

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"


class RequestError(Exception):
    """A request that cannot be answered as asked.

    status   HTTP status; 4xx blames the request, 503 asks to come back later
    param    name of the field at fault, as the client spelled it, or None
    code     short machine-readable word, e.g. "context_length_exceeded"
    retry_after_s  seconds after which a retry is sensible, for 429 and 503
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def error_type(self) -> str:
        """OpenAI's `type` for this status."""
        return _TYPES.get(self.status, INVALID_REQUEST if self.status < 500 else SERVER_ERROR)


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


def unavailable(message: str, *, code: str = "unavailable", retry_after_s: int = 5) -> RequestError:
    """A 503: the server is starting, draining, full or has lost its scheduler."""
    return RequestError(message, status=503, code=code, retry_after_s=retry_after_s)
