"""The safetensors files of a checkpoint: which tensor lies where, and its bytes.

Tensors are read with positioned reads instead of the library's memory map, because mapped pages
stay resident until the file is closed and would double the peak of a single-file checkpoint.
Format: 8-byte little-endian header length, JSON header, data.
"""

from __future__ import annotations

import json
import os
from math import prod
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

INDEX_FILE = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000
_READ_BYTES = 1 << 30  # Linux caps one read below 2 GiB

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def tensor_files(directory: str) -> list[Path]:
    """The checkpoint's safetensors files, sorted.

    Raises:
        FileNotFoundError: there are none, or a file named by the index is missing.
    """
    root = Path(directory)
    index = root / INDEX_FILE
    if not index.is_file():
        files = sorted(root.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(
                f"no *.safetensors in {directory!r}; pass a checkpoint directory with weights"
            )
        return files
    names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    absent = sorted(name for name in names if not (root / name).is_file())
    if absent:
        raise FileNotFoundError(
            f"{INDEX_FILE} in {directory!r} names files that are not there: {', '.join(absent)}; "
            "finish the download"
        )
    return sorted(root / name for name in names)


class SafetensorsFile:
    """One open file; ``names`` in the order of their bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = open(path, "rb")
        header_bytes = int.from_bytes(self._handle.read(8), "little")
        if not 0 < header_bytes <= _MAX_HEADER_BYTES:
            raise ValueError(f"{path} is no safetensors file: header of {header_bytes} bytes")
        header = json.loads(self._handle.read(header_bytes))
        header.pop("__metadata__", None)
        self._entries = header
        self._data_start = 8 + header_bytes
        self.names = sorted(header, key=lambda name: header[name]["data_offsets"][0])
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        have = os.fstat(self._handle.fileno()).st_size - self._data_start
        if have < end:
            raise ValueError(f"{path} lacks {end - have} bytes; the download is incomplete")

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._handle.close()

    def read(self, name: str) -> Tensor:
        """Read one tensor into fresh memory.

        Raises:
            ValueError: unknown dtype, inconsistent header, or the file ends early.
        """
        entry = self._entries[name]
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            raise ValueError(f"{name} in {self.path} has dtype {entry['dtype']}, not supported")
        begin, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        if end - begin != prod(shape) * dtype.itemsize:
            raise ValueError(f"{name} in {self.path}: {end - begin} bytes do not fit shape {shape}")
        raw = torch.empty(end - begin, dtype=torch.uint8)
        view, done = memoryview(raw.numpy().data), 0
        while done < len(view):
            part = view[done : done + _READ_BYTES]
            got = os.preadv(self._handle.fileno(), [part], self._data_start + begin + done)
            if got == 0:
                raise ValueError(f"{self.path} was cut short while {name} was read")
            done += got
        return raw.view(dtype).view(shape)
