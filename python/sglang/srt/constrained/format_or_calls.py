"""A grammar for answers that are JSON of a schema or tool calls, as the model decides."""

from __future__ import annotations

from typing import Any

import orjson

JSON_WHITESPACE = r"( |\n( {0,24}|\t{0,8}))"
"""Between the tokens of JSON: one blank, or one line break and an indent. Models that like blanks
would otherwise never get to the end."""


def format_or_calls(schema: dict[str, Any] | bool, *, tags: tuple[str, str], single: bool) -> str:
    """Lark for llguidance: JSON of ``schema``, or calls of which each stands between ``tags``.

    The vocabulary must have each tag as one added token; no text matches such a token, so what stands
    between them may be any text. ``single``: at most one call.
    """
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    own = {"x-guidance": {"whitespace_pattern": JSON_WHITESPACE}, **schema}
    lines = [
        "start: answer | calls",
        f"answer: %json {orjson.dumps(own).decode()}",
        "calls: call" if single else r"calls: call (/\n*/ call)*",
        rf"call: {tags[0]} /(.|\n)*/ {tags[1]}",
    ]
    return "\n".join(lines) + "\n"
