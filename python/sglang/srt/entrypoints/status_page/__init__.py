"""The status page: three files, served as they are, that read the server's own routes."""

from __future__ import annotations

from importlib import resources

from fastapi.responses import Response

_TYPES = {"index.html": "text/html", "status.css": "text/css", "status.js": "text/javascript"}
PATHS = {"/": "index.html", "/status.css": "status.css", "/status.js": "status.js"}
"""Path of each file. They hold nothing of the server, so they need no key; what they read does."""
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; "
    "frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def page(path: str) -> Response:
    """The file at ``path``. Raises: KeyError for any other path."""
    name = PATHS[path]
    content = resources.files(__name__).joinpath(name).read_bytes()
    return Response(content, media_type=_TYPES[name], headers=_HEADERS)
