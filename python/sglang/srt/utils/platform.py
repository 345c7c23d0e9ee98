"""What hardware this process can use.

Functions that need torch import it when called, never when this module is imported, so that the
front end can use the two driver checks without it.
"""

from __future__ import annotations

import os
import platform
from functools import lru_cache
from pathlib import Path


def has_nvidia_driver() -> bool:
    """Whether an NVIDIA device is visible to this process; needs no torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "unset").strip() in ("", "-1"):
        return False
    return Path("/dev/nvidiactl").exists() or Path("/proc/driver/nvidia/version").exists()


def num_visible_gpus() -> int | None:
    """NVIDIA devices that this process may use; None where only the driver could tell. No torch."""
    there = len([path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()])
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return len([name for name in named.split(",") if name.strip()])
    return there or None


def usable_cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def has_amd_driver() -> bool:
    """Whether an AMD compute device is visible to this process; needs no torch."""
    hidden = ("", "-1")
    names = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    if any(os.environ.get(name, "unset").strip() in hidden for name in names):
        return False
    return Path("/dev/kfd").exists()


@lru_cache(maxsize=1)
def is_cuda() -> bool:
    """Whether torch drives an NVIDIA device here."""
    import torch

    return torch.version.cuda is not None and torch.cuda.is_available()


@lru_cache(maxsize=1)
def is_hip() -> bool:
    """Whether torch was built for ROCm."""
    import torch

    return torch.version.hip is not None


@lru_cache(maxsize=1)
def is_xpu() -> bool:
    """Whether torch drives an Intel GPU here."""
    import torch

    return torch.xpu.is_available()


@lru_cache(maxsize=1)
def is_npu() -> bool:
    """Whether torch knows an Ascend device here (the torch_npu plug-in is loaded)."""
    import torch

    return torch._C._get_privateuse1_backend_name() == "npu"


def is_cpu() -> bool:
    """Whether the CPU engine was asked for through SGLANG_USE_CPU_ENGINE=1 on x86 or Arm.

    A machine without a GPU is not "cpu" in this sense; use `get_device` for that question.
    """
    machine = platform.machine().lower()
    supported = machine in ("x86_64", "amd64", "i386", "i686", "aarch64", "arm64")
    return os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1" and supported


def get_device(device_id: int | None = None) -> str:
    """The torch device string of the best device here: "cuda", "xpu" or "cpu", with an index."""
    if is_cpu():
        return "cpu"
    import torch

    kind = "cpu"
    if torch.cuda.is_available():
        kind = "cuda"
    elif is_xpu():
        kind = "xpu"
    return kind if device_id is None or kind == "cpu" else f"{kind}:{device_id}"


def get_device_sm() -> int:
    """CUDA compute capability as major*10+minor (90 on H100/H200); 0 without an NVIDIA device."""
    if not is_cuda():
        return 0
    import torch

    major, minor = torch.cuda.get_device_capability()
    return major * 10 + minor


def is_sm90_supported() -> bool:
    """Whether the device is of the Hopper generation (compute capability 9.x)."""
    return get_device_sm() // 10 == 9


def is_sm100_supported() -> bool:
    """Whether the device is of the Blackwell data-centre generation (compute capability 10.x)."""
    return get_device_sm() // 10 == 10


def is_gfx95_supported() -> bool:
    """Whether the device is an AMD gfx95x (MI35x)."""
    if not is_hip():
        return False
    import torch

    if not torch.cuda.is_available():
        return False
    return "gfx95" in torch.cuda.get_device_properties(0).gcnArchName
