"""How much memory a plan starts from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.mem_cache.plan_inputs import MemoryPlanError
from sglang.srt.mem_cache.state_sizing import GIB

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

CPU_MEMORY_SHARE = 0.5
"""Share of the host's available memory that a CPU server plans with unless a flag says otherwise."""

MOST_GIB = 1 << 23
"""More than any device; beyond it byte counts would leave the range in which floats are exact."""


def planned_memory(args: ServerArgs) -> int:
    """Bytes of one device: ``--device-memory-gb`` if given, else what the device at hand has."""
    if args.device_memory_gb is not None:
        return _checked(args.device_memory_gb)
    return default_host_budget() if args.device == "cpu" else memory_at_hand(args)


def memory_at_hand(args: ServerArgs) -> int:
    """Bytes that the GPU has, or that are available on the host of a CPU server."""
    if args.device == "cpu":
        return available_host_memory()
    import torch

    return torch.cuda.get_device_properties(args.base_gpu_id).total_memory


def _checked(gib: float) -> int:
    if gib > MOST_GIB or gib * GIB < 1:
        raise MemoryPlanError(
            f"--device-memory-gb {gib:g} is no device's memory: give GiB, at most {MOST_GIB:,}"
        )
    return int(gib * GIB)


def default_host_budget() -> int:
    """Bytes that a CPU server plans with: half of the memory available on this host now."""
    return int(available_host_memory() * CPU_MEMORY_SHARE)


def available_host_memory() -> int:
    """Bytes available on this host now; a container's limit counts where there is one."""
    available = _meminfo("MemAvailable")
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as limit_file:
            limit = limit_file.read().strip()
        with open("/sys/fs/cgroup/memory.current", encoding="ascii") as used_file:
            used = int(used_file.read())
    except OSError:
        limit, used = "max", 0
    if limit.isdigit():
        available = min(available, max(0, int(limit) - used))
    return available


def _meminfo(key: str) -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    raise MemoryPlanError(f"/proc/meminfo has no {key}; give --device-memory-gb")
