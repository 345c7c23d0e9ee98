"""Small helpers about the platform and the network; importing them imports no torch."""

from sglang.srt.utils.network import find_free_port, is_port_available
from sglang.srt.utils.platform import (
    get_device,
    get_device_sm,
    has_amd_driver,
    has_nvidia_driver,
    is_cpu,
    is_cuda,
    is_gfx95_supported,
    is_hip,
    is_npu,
    is_sm90_supported,
    is_sm100_supported,
    is_xpu,
)

__all__ = [
    "find_free_port",
    "get_device",
    "get_device_sm",
    "has_amd_driver",
    "has_nvidia_driver",
    "is_cpu",
    "is_cuda",
    "is_gfx95_supported",
    "is_hip",
    "is_npu",
    "is_port_available",
    "is_sm100_supported",
    "is_sm90_supported",
    "is_xpu",
]
