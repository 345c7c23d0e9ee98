"""Tiny random checkpoints in the real on-disk formats, for tests."""

from sglang.test.checkpoints.geometry import ARCHITECTURES, TinyGeometry, default_geometry
from sglang.test.checkpoints.writer import CheckpointError, write_checkpoint

__all__ = [
    "ARCHITECTURES",
    "CheckpointError",
    "TinyGeometry",
    "default_geometry",
    "write_checkpoint",
]
