"""The one error type whose message is meant for the person at the command line."""

from __future__ import annotations


class DemoModelError(RuntimeError):
    """Something the user can put right; the message says what and how."""
