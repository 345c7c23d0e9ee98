"""Flags that are right by themselves and that nothing reads beside another one: named, not dropped."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.arg_groups.flag import spell

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Idle:
    """Flags that have no effect while ``cause`` is given."""

    cause: str
    names: tuple[str, ...]
    is_given: Callable[[ServerArgs], bool]


IDLE = (
    Idle(
        "disable_radix_cache",
        ("mamba_track_interval", "schedule_policy"),
        lambda a: a.disable_radix_cache,
    ),
    Idle(
        "skip_tokenizer_init",
        ("tokenizer_path", "chat_template", "tool_call_parser", "reasoning_parser"),
        lambda a: a.skip_tokenizer_init,
    ),
    Idle(
        "max_mamba_cache_size",
        ("mamba_full_memory_ratio",),
        lambda a: a.max_mamba_cache_size is not None,
    ),
    Idle("hicache_size", ("hicache_ratio",), lambda a: a.hicache_size > 0),
)


def name_what_has_no_effect(args: ServerArgs) -> None:
    """Log a line for each flag that is given and that nothing will read. Before defaults are filled."""
    defaults = {flag.name: flag.default for flag in args.flags()}
    for idle in IDLE:
        if not idle.is_given(args):
            continue
        for name in idle.names:
            value = args.__dict__[name]
            if value != defaults[name]:
                logger.warning("%s %s: no effect with %s", spell(name), value, spell(idle.cause))
