"""One declaration per server argument: default, help text, allowed values.

A field of an argument group is written `name: type = flag(default, "help")`. The command line, the
checks at start and the documentation are all made from that one line.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_METADATA_KEY = "flag"


@dataclass(frozen=True)
class FlagSpec:
    """What a field says about itself beside its type and default.

    `choices` are all values that exist; `minimum` and `maximum` are inclusive, `above` and `below`
    exclusive. `auto` says in words what an unset (None or "auto") value becomes.
    """

    help: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    metavar: str | None = None
    auto: str = ""


@dataclass(frozen=True)
class Flag:
    """A field of an argument group as command line and documentation see it."""

    name: str
    type: type
    is_list: bool
    optional: bool
    default: Any
    spec: FlagSpec

    @property
    def spelling(self) -> str:
        """The flag on the command line."""
        return spell(self.name)


def spell(name: str) -> str:
    """`speculative_num_steps` -> `--speculative-num-steps`."""
    return "--" + name.replace("_", "-")


def flag(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    metavar: str | None = None,
    auto: str = "",
) -> Any:
    """Declare a field of an argument group; see `FlagSpec` for the keywords."""
    spec = FlagSpec(help, choices, minimum, maximum, above, below, metavar, auto)
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata={_METADATA_KEY: spec})
    return dataclasses.field(default=default, metadata={_METADATA_KEY: spec})


def required_flag(help: str, *, metavar: str | None = None) -> Any:
    """Declare a field without a default."""
    return dataclasses.field(metadata={_METADATA_KEY: FlagSpec(help, metavar=metavar)})


def _value_type(hint: Any) -> tuple[type, bool, bool]:
    """(type of one value, is a list, may be None) of a field's annotation."""
    optional = False
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        members = [m for m in typing.get_args(hint) if m is not type(None)]
        if len(members) != 1:
            raise TypeError(f"an argument has one type, got {hint}")
        hint, optional = members[0], True
    if typing.get_origin(hint) is list:
        (element,) = typing.get_args(hint)
        return element, True, optional
    return hint, False, optional


def flags_of(group: type) -> Iterator[Flag]:
    """The flags that a dataclass declares, those of its base classes included, in order."""
    hints = typing.get_type_hints(group)
    for field in dataclasses.fields(group):
        spec = field.metadata.get(_METADATA_KEY)
        if not isinstance(spec, FlagSpec):
            continue
        value_type, is_list, optional = _value_type(hints[field.name])
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        yield Flag(field.name, value_type, is_list, optional, default, spec)
