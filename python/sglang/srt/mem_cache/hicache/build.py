"""Put the host and file tiers behind a tree, from the pools and the user's settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sglang.srt.mem_cache.device_memory import available_host_memory
from sglang.srt.mem_cache.hicache.blob_io import BlobIO
from sglang.srt.mem_cache.hierarchical_cache import (
    FileTier,
    HierarchicalCache,
    HostTierSize,
    fingerprint_of,
)
from sglang.srt.mem_cache.pool.kv_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool.mamba_pool import MambaPool
from sglang.srt.mem_cache.radix_cache import RadixCache


@dataclass(frozen=True)
class HostTierSettings:
    """The ``--hicache-*`` flags.

    ``storage_dir`` None means no file tier. ``identity`` must hold everything besides weights and
    tensor layout that changes KV or states (model configuration, dtypes, quantization, TP rank).
    """

    ratio: float = 2.0
    size_gb: float = 0.0
    write_policy: str = "write_through"
    storage_dir: Path | None = None
    identity: dict[str, object] = field(default_factory=dict)
    weight_files: Sequence[Path] = ()


def build_host_tier(
    *,
    tree: RadixCache,
    kv_pools: Sequence[MHATokenToKVPool],
    mamba_pool: MambaPool | None,
    settings: HostTierSettings,
) -> HierarchicalCache:
    """Allocate the host tier and make it the tree's listener.

    ``kv_pools``: every pool addressed by the tree's KV slots, the target's first, the draft's after.
    Raises: ValueError naming the flag when sizes or directory cannot work.
    """
    page_size = tree.page_size
    page_io = BlobIO(
        [tensor for pool in kv_pools for tensor in pool.named_tensors().values()],
        slot_axis=0,
        slots_per_item=page_size,
    )
    state_io = None
    if mamba_pool is not None:
        state = mamba_pool.mamba_cache
        state_io = BlobIO([*state.conv, state.temporal], slot_axis=1, slots_per_item=1)
    size = HostTierSize.resolve(
        page_bytes=page_io.item_bytes,
        state_bytes=state_io.item_bytes if state_io is not None else 0,
        num_device_pages=kv_pools[0].size // page_size,
        num_device_states=mamba_pool.size if mamba_pool is not None else 0,
        ratio=settings.ratio,
        size_gb=settings.size_gb,
        host_bytes=_host_bytes(kv_pools, mamba_pool),
    )
    layout = {
        "pages": page_io.describe(),
        "states": state_io.describe() if state_io is not None else "none",
    }
    fingerprint = fingerprint_of({**settings.identity, **layout}, list(settings.weight_files))
    files = None
    if settings.storage_dir is not None:
        files = FileTier.open(
            settings.storage_dir,
            fingerprint,
            page_io.item_bytes,
            state_io.item_bytes if state_io is not None else None,
        )
    return HierarchicalCache(
        tree=tree,
        page_io=page_io,
        state_io=state_io,
        size=size,
        fingerprint=fingerprint,
        write_policy=settings.write_policy,
        files=files,
    )


def _host_bytes(kv_pools: Sequence[MHATokenToKVPool], mamba_pool: MambaPool | None) -> int:
    """Host memory left for the tier. Pools of a CPU server live there too, and fill up later."""
    available = available_host_memory()
    if kv_pools[0].get_key_buffer(0).device.type != "cpu":
        return available
    held = sum(pool.get_kv_size_bytes() for pool in kv_pools)
    held += mamba_pool.get_kv_size_bytes() if mamba_pool is not None else 0
    return max(0, available - held)
