"""The compiled CPU kernels, loaded once per process, or the decision to do without.

``select`` is called by the owner of the configuration; kernels read no environment for it. All
native entry points and their PyTorch twins look here, so that one process never mixes the two.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable

from sglang.kernels.ops.cpu.build import BuildError, build

logger = logging.getLogger(__name__)

MODES = ("auto", "native", "torch")
ABI_VERSION = 1


class _Choice:
    mode: str | None = None
    resolved = False
    library: ctypes.CDLL | None = None


_choice = _Choice()
_on_load: list[Callable[[ctypes.CDLL], None]] = []


def select(mode: str) -> None:
    """Choose ``native`` (fail without a compiler), ``torch``, or ``auto`` (native if possible).

    Raises:
        ValueError: unknown mode.
    """
    if mode not in MODES:
        raise ValueError(f"CPU kernels {mode!r} unknown; use one of {', '.join(MODES)}")
    if mode == _choice.mode:
        return
    _choice.mode = mode
    _choice.resolved = False
    _choice.library = None


def is_selected() -> bool:
    """Whether ``select`` has been called; until then the mode is ``auto``."""
    return _choice.mode is not None


def declare(signatures: Callable[[ctypes.CDLL], None]) -> Callable[[ctypes.CDLL], None]:
    """Register a function that sets argtypes on the library whenever one is loaded."""
    _on_load.append(signatures)
    if _choice.library is not None:
        signatures(_choice.library)
    return signatures


def library() -> ctypes.CDLL | None:
    """The loaded kernels, or None where the PyTorch twins are in charge.

    Raises:
        BuildError: mode ``native`` and the kernels cannot be built.
    """
    if not _choice.resolved:
        _choice.library = _load()
        _choice.resolved = True
    return _choice.library


def _load() -> ctypes.CDLL | None:
    if _choice.mode == "torch":
        return None
    try:
        loaded = ctypes.CDLL(str(build()))
    except (BuildError, OSError) as error:
        if _choice.mode == "native":
            raise
        logger.warning("CPU kernels not available, using plain PyTorch: %s", error)
        return None
    loaded.sgl_abi_version.restype = ctypes.c_int
    if loaded.sgl_abi_version() != ABI_VERSION:
        raise BuildError("cached CPU kernels have another ABI; clear the kernel cache")
    for signatures in _on_load:
        signatures(loaded)
    return loaded
