"""Environment variables that the engine reads, each declared once with its type and default.

`envs.NAME` is a field object, not a value: call `.get()`. Nothing is cached, so a change of
`os.environ` is seen by the next `.get()`. This module imports neither torch nor anything of ours.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

_TRUE = frozenset({"true", "1", "yes", "y"})
_FALSE = frozenset({"false", "0", "no", "n"})


def parse_bool(text: str) -> bool:
    """Read true/1/yes/y and false/0/no/n in any case; anything else is a ValueError."""
    lowered = text.strip().lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise ValueError(f"{text!r} is not a boolean; use true/1/yes/y or false/0/no/n")


class EnvField(Generic[T]):
    """One variable: its name, how its text is read, and the value when it is not set.

    `set(None)` and `override(None)` make `get()` return None whatever the default is; a text
    written to `os.environ` afterwards wins over that.
    """

    def __init__(self, parse: Callable[[str], T], default: T | Callable[[], T] | None) -> None:
        self._parse = parse
        self._default = default
        self._explicitly_none = False
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @property
    def default(self) -> T | None:
        """The value of an unset variable; a callable default is called each time."""
        if callable(self._default):
            return self._default()
        return self._default

    def get(self) -> T | None:
        """The present value. Text that cannot be read warns and counts as unset."""
        text = os.environ.get(self.name)
        if text is None:
            return None if self._explicitly_none else self.default
        try:
            return self._parse(text)
        except ValueError as error:
            logger.warning(
                "environment variable %s: %s; using the default %r", self.name, error, self.default
            )
            return self.default

    def is_set(self) -> bool:
        """Whether a value was given, an explicit None included."""
        return self._explicitly_none or self.name in os.environ

    def set(self, value: T | None) -> None:
        """Give the variable a value, for this process and those it starts."""
        self._explicitly_none = value is None
        if value is None:
            os.environ.pop(self.name, None)
        else:
            os.environ[self.name] = str(value)

    def clear(self) -> None:
        """Forget the value, so that the default applies again."""
        self._explicitly_none = False
        os.environ.pop(self.name, None)

    @contextlib.contextmanager
    def override(self, value: T | None) -> Iterator[None]:
        """Give the variable a value inside a `with`; the former one returns even on an error."""
        former_text = os.environ.get(self.name)
        former_none = self._explicitly_none
        self.set(value)
        try:
            yield
        finally:
            self.clear()
            self._explicitly_none = former_none
            if former_text is not None:
                os.environ[self.name] = former_text

    def __bool__(self) -> bool:
        raise RuntimeError(f"envs.{self.name} is a field, not a value; use envs.{self.name}.get()")

    def __len__(self) -> int:
        raise RuntimeError(f"envs.{self.name} is a field, not a value; use envs.{self.name}.get()")

    def __repr__(self) -> str:
        return f"EnvField({self.name}={self.get()!r})"


def _number(text: str) -> float:
    value = float(text)
    if math.isnan(value):
        raise ValueError(f"{text!r} is not a number")
    return value


def EnvBool(default: bool | Callable[[], bool] | None) -> EnvField[bool]:
    """A boolean variable."""
    return EnvField(parse_bool, default)


def EnvInt(default: int | Callable[[], int] | None) -> EnvField[int]:
    """An integer variable."""
    return EnvField(int, default)


def EnvFloat(default: float | Callable[[], float] | None) -> EnvField[float]:
    """A floating-point variable; NaN is not a value."""
    return EnvField(_number, default)


def EnvStr(default: str | Callable[[], str] | None) -> EnvField[str]:
    """A text variable."""
    return EnvField(str, default)


class Envs:
    """Every variable of the engine. Assigning to an attribute is an error: use `.set()`."""

    # Tests and CI.
    SGLANG_IS_IN_CI = EnvBool(False)
    SGLANG_TEST_MAX_RETRY = EnvInt(None)

    # Speculative decoding.
    SGLANG_ENABLE_PP_SPEC = EnvBool(False)
    SGLANG_RAGGED_VERIFY_MODE = EnvStr("static")
    SGLANG_SIMULATE_ACC_LEN = EnvFloat(-1.0)
    SGLANG_SIMULATE_ACC_METHOD = EnvStr("match-expected")
    SGLANG_SIMULATE_ACC_TOKEN_MODE = EnvStr("real-draft-token")
    SGLANG_DSPARK_USE_GREEDY_DRAFT = EnvBool(False)

    # Recurrent state.
    SGLANG_MAMBA_SSM_DTYPE = EnvStr(None)
    SGLANG_MAMBA_CONV_DTYPE = EnvStr("bfloat16")
    SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK = EnvBool(False)
    # No effect: clearing and copying state slots is plain PyTorch here already.
    SGLANG_DISABLE_FUSED_MAMBA_SLOT_OPS = EnvBool(False)
    SGLANG_VALIDATE_MAMBA_REPLAY_STATE_INDICES = EnvBool(False)

    # Memory.
    SGLANG_DEBUG_MEMORY_POOL = EnvBool(False)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"assigning envs.{name} would hide the field; use envs.{name}.set()")


envs = Envs()
