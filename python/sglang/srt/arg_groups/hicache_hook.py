"""The host tier of the prefix cache: its flags make sense only together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.arg_groups.flag import spell

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

_TIER_FLAGS = (
    "hicache_ratio",
    "hicache_size",
    "hicache_write_policy",
    "hicache_storage_backend",
    "hicache_storage_dir",
)


def handle_hierarchical_cache(args: ServerArgs) -> None:
    """Refuse a host tier without a prefix cache, and its settings without a host tier."""
    defaults = {flag.name: flag.default for flag in args.flags()}
    if not args.enable_hierarchical_cache:
        for name in _TIER_FLAGS:
            value = args.__dict__[name]
            if value != defaults[name]:
                raise ValueError(
                    f"{spell(name)} {value} needs --enable-hierarchical-cache; give both or neither"
                )
        return
    if args.disable_radix_cache:
        raise ValueError(
            "--enable-hierarchical-cache keeps what the prefix cache evicts, and "
            "--disable-radix-cache turns that off; leave one of them out"
        )
    if args.hicache_storage_dir is not None and args.hicache_storage_backend != "file":
        raise ValueError(
            f"--hicache-storage-dir {args.hicache_storage_dir} needs --hicache-storage-backend file"
        )
