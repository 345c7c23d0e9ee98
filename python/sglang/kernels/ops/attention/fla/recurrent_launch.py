"""Tile and warp count of the recurrent kernels, as data keyed by device and shape."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

NUM_STAGES = 3


@dataclass(frozen=True)
class DeviceTraits:
    """What the table asks of a device: CUDA compute capability (0 elsewhere) and gfx95x."""

    sm: int
    is_gfx95: bool


@dataclass(frozen=True)
class RecurrentShape:
    """n requests, h key heads, hv value heads, k and v head dims, draft steps of a verify.

    The table also answers for KDA, whose decay is per key channel; no kernel here serves it.
    """

    n: int
    h: int
    hv: int
    k: int
    v: int
    is_verify: bool
    is_packed_decode: bool
    steps: int
    is_kda: bool = False


@dataclass(frozen=True)
class RecurrentLaunch:
    """block_v state rows per program and warps per program."""

    block_v: int
    num_warps: int


@lru_cache(maxsize=1)
def current_device_traits() -> DeviceTraits:
    """Traits of device 0; all zero on a machine without one."""
    if not torch.cuda.is_available():
        return DeviceTraits(sm=0, is_gfx95=False)
    if torch.version.hip is not None:
        name = torch.cuda.get_device_properties(0).gcnArchName
        return DeviceTraits(sm=0, is_gfx95="gfx95" in name)
    major, minor = torch.cuda.get_device_capability(0)
    return DeviceTraits(sm=major * 10 + minor, is_gfx95=False)


_KDA_NARROW_ON_SM103 = RecurrentShape(1, 8, 8, 128, 128, True, False, 8, True)


def select_recurrent_launch(shape: RecurrentShape, device: DeviceTraits) -> RecurrentLaunch:
    """The launch for a shape. Narrow tiles only where they are known to equal the wide tile bit for bit."""
    wide = RecurrentLaunch(min(1 << (shape.v - 1).bit_length(), 32), 1)
    if shape.is_kda:
        narrow_kda = device.sm == 107 and shape.is_verify
        narrow_kda |= device.sm == 103 and shape == _KDA_NARROW_ON_SM103
        return RecurrentLaunch(4, 1) if narrow_kda else wide
    square = shape.k == 128 and shape.v == 128
    if device.is_gfx95 and square and (shape.h, shape.hv) == (4, 16) and 1 <= shape.n <= 32:
        return RecurrentLaunch(8, 4) if shape.n == 1 else RecurrentLaunch(16, 2)
    narrow = shape.is_verify or shape.is_packed_decode
    if device.sm == 90 and narrow and square and 1 <= shape.n <= 64:
        return RecurrentLaunch(4, 1)
    return wide
