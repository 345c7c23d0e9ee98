"""HTTP/1.1 whose request lines and headers may not grow without end: the body's limit is the gatekeeper's."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
"""Bytes of a request line and its headers that may be waited for."""


class BoundedHeadProtocol(HttpToolsProtocol):
    """Answers 400 and closes once a head is not complete after `MAX_HEAD_BYTES`.

    The parser joins the pieces of a header as they come, so a long one costs memory and, quadratically,
    time that every other client waits for.
    """

    _head_bytes = 0
    _chunk_bytes = 0
    _in_head = False

    def on_message_begin(self) -> None:
        super().on_message_begin()
        # What stands before it in the same chunk may be another request's body.
        self._head_bytes, self._in_head = -self._chunk_bytes, True

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        self._chunk_bytes = len(data)
        super().data_received(data)
        self._head_bytes += len(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The headers are larger than {MAX_HEAD_BYTES} bytes.")
