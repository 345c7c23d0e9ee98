"""Is every value by itself of the right type and in its range?"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from sglang.srt.arg_groups.flag import Flag
from sglang.srt.arg_groups.not_in_this_build import offered_choices

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


def _range_in_words(flag: Flag) -> str:
    spec = flag.spec
    bounds = (
        ("at least", spec.minimum),
        ("at most", spec.maximum),
        ("above", spec.above),
        ("below", spec.below),
    )
    return " and ".join(f"{word} {_plain(bound)}" for word, bound in bounds if bound is not None)


def _plain(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def _in_range(flag: Flag, value: float) -> bool:
    spec = flag.spec
    return (
        math.isfinite(value)
        and (spec.minimum is None or value >= spec.minimum)
        and (spec.maximum is None or value <= spec.maximum)
        and (spec.above is None or value > spec.above)
        and (spec.below is None or value < spec.below)
    )


def _has_type(flag: Flag, value: Any) -> bool:
    if flag.type is bool or isinstance(value, bool):
        return flag.type is bool and isinstance(value, bool)
    if flag.type is float:
        return isinstance(value, int | float)
    return isinstance(value, flag.type)


def _check_one(flag: Flag, value: Any) -> None:
    if not _has_type(flag, value):
        raise ValueError(f"{flag.spelling} must be of type {flag.type.__name__}, got {value!r}")
    if flag.spec.choices and value not in flag.spec.choices:
        allowed = ", ".join(offered_choices(flag))
        raise ValueError(f"{flag.spelling} {value} is not known; use one of {allowed}")
    if flag.type in (int, float) and not _in_range(flag, value):
        raise ValueError(f"{flag.spelling} must be {_range_in_words(flag)}, got {value}")


def check_values(server_args: ServerArgs) -> None:
    """Raise a ValueError that names the first flag whose value has a wrong type or range."""
    for flag in server_args.flags():
        value = getattr(server_args, flag.name)
        if value is None and (flag.optional or flag.default is None):
            continue
        if not flag.is_list:
            _check_one(flag, value)
            continue
        if not isinstance(value, list):
            raise ValueError(f"{flag.spelling} must be a list, got {value!r}")
        for item in value:
            _check_one(flag, item)
