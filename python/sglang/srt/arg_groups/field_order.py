"""Order of the positional arguments of `ServerArgs(...)`.

Callers may pass fields by position, so this order never changes: a new field goes to the end of the
tuple, wherever its group lists it. Fields that are not listed follow in the order of their groups.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

C = TypeVar("C", bound=type)

POSITIONAL_FIELD_ORDER: tuple[str, ...] = (
    "model_path",
    "tokenizer_path",
    "skip_tokenizer_init",
    "load_format",
    "dtype",
    "quantization",
    "context_length",
    "served_model_name",
    "host",
    "port",
)


def full_field_order(cls: type, first: Sequence[str] = POSITIONAL_FIELD_ORDER) -> tuple[str, ...]:
    """Names of all init fields of the dataclass: the listed ones, then the others."""
    names = [field.name for field in dataclasses.fields(cls) if field.init]
    return (*first, *(name for name in names if name not in first))


def positional_order(first: Sequence[str]) -> Callable[[C], C]:
    """Class decorator: the dataclass takes positional arguments in this order."""

    def decorate(cls: C) -> C:
        order = full_field_order(cls, first)
        by_keyword = cls.__init__  # type: ignore[misc]

        @functools.wraps(by_keyword)
        def __init__(self: Any, *args: Any, **values: Any) -> None:
            if len(args) > len(order):
                raise TypeError(f"{cls.__name__} takes {len(order)} values, got {len(args)}")
            for name, value in zip(order, args):
                if name in values:
                    raise TypeError(f"{cls.__name__} got two values for {name!r}")
                values[name] = value
            by_keyword(self, **values)

        signature = inspect.signature(by_keyword)
        parameters = dict(signature.parameters)
        own_self = parameters.pop("self")
        ordered = [own_self, *(parameters[name] for name in order)]
        __init__.__signature__ = signature.replace(parameters=ordered)  # type: ignore[attr-defined]
        cls.__init__ = __init__  # type: ignore[misc]
        return cls

    return decorate
