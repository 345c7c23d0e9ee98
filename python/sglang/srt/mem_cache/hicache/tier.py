"""One kind of item (pages or states) behind the device: host memory, then files."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sglang.srt.mem_cache.hicache.blob_io import BlobIO
from sglang.srt.mem_cache.hicache.file_store import FileStore
from sglang.srt.mem_cache.hicache.host_store import HostStore


@dataclass(frozen=True)
class SecuredItems:
    """Items that cannot disappear: rows read from files, and the rest pinned in host memory."""

    digests: list[bytes]
    rows: dict[bytes, torch.Tensor]


class Tier:
    """Items of one kind, filed under digests; see ``HostStore`` and ``FileStore``."""

    def __init__(self, io: BlobIO, capacity: int, files: FileStore | None) -> None:
        self._io = io
        self._files = files
        self.store = HostStore(io, capacity, files.put if files is not None else None)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self.store or (self._files is not None and digest in self._files)

    @property
    def num_files(self) -> int:
        return len(self._files) if self._files is not None else 0

    def save(self, digests: list[bytes], slots: np.ndarray) -> None:
        """Copy device items that are not in host memory yet."""
        self.store.poll()
        self.store.save(digests, slots)

    def secure(self, digests: list[bytes]) -> SecuredItems | None:
        """Pin or read every item; None, and nothing is pinned, if one of them is nowhere whole."""
        rows = {}
        for digest in digests:
            if digest not in self.store:
                row = self._files.get(digest) if self._files is not None else None
                if row is None:
                    return None
                rows[digest] = torch.frombuffer(bytearray(row), dtype=torch.uint8)
        for digest in digests:
            if digest not in rows:
                self.store.pin(digest)
        if self._files is not None:
            self._files.touch(digests)
        return SecuredItems(digests, rows)

    def load(self, items: SecuredItems, slots: np.ndarray) -> None:
        """Copy secured items into device ``slots``, ordered before later work on its stream."""
        if not items.digests:
            return
        rows = [
            items.rows[digest] if digest in items.rows else self.store.read(digest)
            for digest in items.digests
        ]
        stacked = torch.stack(rows)
        if self._io.device.type == "cuda":
            stacked = stacked.pin_memory().to(self._io.device, non_blocking=True)
        self._io.unpack(stacked, slots)
        self.store.touch(items.digests)

    def let_go(self, items: SecuredItems) -> None:
        """End what ``secure`` began."""
        for digest in items.digests:
            if digest not in items.rows:
                self.store.unpin(digest)

    def wait(self) -> None:
        """Wait until every copy and every file is written."""
        self.store.wait()
        if self._files is not None:
            self._files.drain()

    def clear(self) -> None:
        """Forget everything, files included."""
        self.store.clear()
        if self._files is not None:
            self._files.clear()

    def close(self) -> None:
        """Finish all writing, and give host memory back."""
        self.store.close()
        if self._files is not None:
            self._files.close()
