"""Inference for hybrid Gated-DeltaNet models, in SGLang's shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.version import __version__

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine

__all__ = ["Engine", "__version__"]


def __getattr__(name: str) -> Any:
    """Import `Engine` on first use, so that `import sglang` costs nothing."""
    if name == "Engine":
        from sglang.srt.entrypoints.engine import Engine

        return Engine
    raise AttributeError(f"module 'sglang' has no attribute {name!r}")
