"""Arguments about memory: pools, prefix cache, host tier."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.arg_groups.flag import flag


@dataclass
class MemoryFields:
    """How much memory is used, and for what."""

    mem_fraction_static: float | None = flag(
        None,
        "Share of the device's memory for weights and pools together.",
        above=0,
        below=1,
        auto="chosen by the memory planner",
    )
    device_memory_gb: float | None = flag(
        None,
        "Plan as if the device had this much memory, in GiB. On a CPU it is the memory that the "
        "server may use.",
        above=0,
        metavar="GIB",
        auto="what the device has",
    )
    max_total_tokens: int | None = flag(
        None, "Upper limit of the KV pool, in tokens.", minimum=1, auto="what fits"
    )
    page_size: int | None = flag(
        None,
        "Tokens in one page of the KV pool.",
        minimum=1,
        auto="64, or 1 with --mamba-radix-cache-strategy no_buffer",
    )
    kv_cache_dtype: str = flag(
        "auto",
        "Type of keys and values in the pool.",
        choices=("auto", "bf16", "bfloat16", "float32", "fp8_e4m3"),
        auto="the model's dtype",
    )
    disable_radix_cache: bool = flag(False, "Do not keep prefixes for later requests.")
    enable_hierarchical_cache: bool = flag(
        False, "Keep evicted prefixes (KV and recurrent state) in host memory."
    )
    hicache_ratio: float = flag(
        2.0, "Size of the host tier as a multiple of the device's pools.", above=0
    )
    hicache_size: float = flag(
        0.0, "Size of the host tier in GB; 0 leaves it to --hicache-ratio.", minimum=0
    )
    hicache_write_policy: str = flag(
        "write_through",
        "When a prefix is copied to the host tier: when it is cached, or when it is evicted.",
        choices=("write_through", "write_back"),
    )
    hicache_storage_backend: str | None = flag(
        None,
        "Third tier behind host memory.",
        choices=("file",),
        auto="none",
    )
    hicache_storage_dir: str | None = flag(
        None, "Directory of the file tier.", metavar="DIR", auto="a directory in the user's cache"
    )
    enable_unified_memory: bool = flag(
        False, "Share one pool between KV and recurrent state instead of two fixed ones."
    )
