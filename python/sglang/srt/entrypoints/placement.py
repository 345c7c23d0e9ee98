"""Which part of the host each scheduler process gets."""

from __future__ import annotations

import os
from typing import Any

from sglang.srt.mem_cache.device_memory import default_host_budget

_GIB = 1 << 30


def place(
    server_args: dict[str, Any], replica: int, count: int
) -> tuple[dict[str, Any], dict[str, str]]:
    """Arguments and extra environment of replica number `replica` of `count`.

    On a CPU the replicas share its threads and, unless --device-memory-gb says what each may have, its
    memory; --base-gpu-id means nothing there. On GPUs each sees only its own, from --base-gpu-id on.
    """
    own = {**server_args, "base_gpu_id": 0}
    if own["device"] == "cpu":
        if count > 1:
            own["cpu_threads"] = max(1, own["cpu_threads"] // count)
            if own["device_memory_gb"] is None:
                own["device_memory_gb"] = default_host_budget() / _GIB / count
        return own, {}
    width = own["tp_size"]
    first = server_args["base_gpu_id"] + replica * width
    if first == 0 and count == 1:
        return own, {}
    names = ",".join(_visible_gpu(first + at) for at in range(width))
    return own, {"CUDA_VISIBLE_DEVICES": names}


def _visible_gpu(at: int) -> str:
    """Name of the `at`-th GPU that this process may use; "-1" hides them all if there are fewer."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if not visible:
        return str(at)
    return visible[at] if at < len(visible) else "-1"
