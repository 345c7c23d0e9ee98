"""Arguments about several devices."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.arg_groups.flag import flag


@dataclass
class ParallelFields:
    """Devices and how the model is spread over them."""

    device: str = flag(
        "auto",
        "Device to run on.",
        choices=("auto", "cuda", "cpu", "xpu", "npu"),
        auto="cuda where a GPU is visible, cpu otherwise",
    )
    base_gpu_id: int = flag(0, "Index of the first GPU.", minimum=0, maximum=1023)
    tp_size: int = flag(1, "Devices that share each layer (tensor parallelism).", minimum=1)
    pp_size: int = flag(1, "Groups of layers on different devices (pipeline).", minimum=1)
    dp_size: int = flag(1, "Replicas of the model behind one address.", minimum=1, maximum=256)
    dist_init_addr: str | None = flag(
        None,
        "host:port at which the ranks of one model meet.",
        metavar="HOST:PORT",
        auto="a free port on this machine",
    )
    dist_timeout: float = flag(600.0, "Seconds to wait for other ranks before giving up.", above=0)
    cpu_threads: int | None = flag(
        None,
        "Threads that the CPU engine computes with.",
        minimum=1,
        maximum=1024,
        metavar="N",
        auto="the cores this process may use, at most 8",
    )
