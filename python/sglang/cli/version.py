"""`sglang version`."""

from __future__ import annotations

from collections.abc import Sequence

from sglang.version import __version__


def main(argv: Sequence[str]) -> int:
    """Print the version."""
    print(__version__)
    return 0
