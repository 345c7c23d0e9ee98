"""A bounded store of byte rows in host memory, least recently used first out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import torch

from sglang.srt.mem_cache.hicache.blob_io import BlobIO
from sglang.srt.mem_cache.hicache.pinned import PinnedRows
from sglang.srt.mem_cache.integrity import IntegrityError

OnStored = Callable[[bytes, bytes], None]


class HostStore:
    """Rows of one kind (pages or states), filed under digests.

    On a GPU the memory is pinned and rows are written on a stream of its own: the device's slots may
    be reused at once, because they are first gathered on the stream that the model runs on. A row
    is read, evicted or handed to ``on_stored`` only when its copy has arrived.
    """

    def __init__(self, io: BlobIO, capacity: int, on_stored: OnStored | None = None) -> None:
        self._io = io
        self.capacity = capacity
        self._is_cuda = io.device.type == "cuda"
        self._pinned = PinnedRows(capacity, io.item_bytes) if self._is_cuda else None
        self._rows = (
            torch.empty((capacity, io.item_bytes), dtype=torch.uint8)
            if self._pinned is None
            else self._pinned.rows
        )
        self._stream = torch.cuda.Stream(io.device) if self._is_cuda else None
        self._on_stored = on_stored
        self._index: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(
            range(capacity)
        )  # taken from the end, so that a save gets a run of places
        self._pins: dict[bytes, int] = {}
        self._in_flight: dict[bytes, torch.cuda.Event] = {}

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._index

    def __len__(self) -> int:
        return len(self._index)

    def save(self, digests: list[bytes], slots: np.ndarray) -> None:
        """Copy items from the device, those not yet here; ``slots`` as in ``BlobIO.pack``.

        Later items become the older ones, so that of a long prefix the tail goes first. Items for
        which there is no room (everything is pinned) are left out.
        """
        per_item = len(slots) // max(1, len(digests))
        wanted = [i for i, digest in enumerate(digests) if digest not in self._index]
        places = self._reserve([digests[i] for i in wanted])
        wanted = [i for i in wanted if digests[i] in places]
        if not wanted:
            return
        chosen = np.concatenate([slots[i * per_item : (i + 1) * per_item] for i in wanted])
        names = [digests[i] for i in wanted]
        self._write(names, [places[name] for name in names], self._io.pack(chosen))

    def _reserve(self, digests: list[bytes]) -> dict[bytes, int]:
        places: dict[bytes, int] = {}
        room = self.capacity - len(self._pins)
        for digest in reversed(digests[:room]):
            if not self._free and not self._evict_one(places):
                break
            places[digest] = self._index[digest] = self._free.pop()
        return places

    def _evict_one(self, keep: dict[bytes, int]) -> bool:
        for digest in self._index:
            if digest not in self._pins and digest not in keep:
                self.drop(digest)
                return True
        return False

    def _write(self, names: list[bytes], places: list[int], packed: torch.Tensor) -> None:
        if self._stream is None:
            self._copy_rows(places, packed)
            for name in names:
                self._arrived(name)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._io.device))
        with torch.cuda.stream(self._stream):
            self._copy_rows(places, packed)
            packed.record_stream(self._stream)
            event = torch.cuda.Event()
            event.record(self._stream)
        for name in names:
            self._in_flight[name] = event

    def _copy_rows(self, places: list[int], packed: torch.Tensor) -> None:
        """One copy per range of consecutive places."""
        start = 0
        for i in range(1, len(places) + 1):
            if i < len(places) and places[i] == places[i - 1] + 1:
                continue
            target = self._rows[places[start] : places[start] + i - start]
            target.copy_(packed[start:i], non_blocking=self._is_cuda)
            start = i

    def _row(self, digest: bytes) -> torch.Tensor:
        return self._rows[self._index[digest]]

    def _arrived(self, digest: bytes) -> None:
        if self._on_stored is not None:
            self._on_stored(digest, self._row(digest).numpy().tobytes())

    def poll(self) -> None:
        """Hand over the rows whose copies have arrived since the last call."""
        for digest in [d for d, event in self._in_flight.items() if event.query()]:
            del self._in_flight[digest]
            self._arrived(digest)

    def wait(self) -> None:
        """Wait for every copy."""
        for event in set(self._in_flight.values()):
            event.synchronize()
        self.poll()

    def _settle(self, digest: bytes) -> None:
        event = self._in_flight.pop(digest, None)
        if event is not None:
            event.synchronize()
            self._arrived(digest)

    def read(self, digest: bytes) -> torch.Tensor:
        """The row of an item that is here, a view; valid while the item is pinned."""
        self._settle(digest)
        return self._row(digest)

    def touch(self, digests: list[bytes]) -> None:
        """Make items the youngest, the first of them youngest of all."""
        for digest in reversed(digests):
            if digest in self._index:
                self._index.move_to_end(digest)

    def pin(self, digest: bytes) -> None:
        self._pins[digest] = self._pins.get(digest, 0) + 1

    def unpin(self, digest: bytes) -> None:
        self._pins[digest] -= 1
        if not self._pins[digest]:
            del self._pins[digest]

    def drop(self, digest: bytes) -> None:
        """Forget an item that is not pinned."""
        if digest in self._pins:
            raise IntegrityError(f"host item {digest.hex()} is dropped while it is being read")
        self._settle(digest)
        self._free.append(self._index.pop(digest))

    def clear(self) -> None:
        for digest in list(self._index):
            self.drop(digest)

    def close(self) -> None:
        """Wait for every copy and give the memory back; nothing may be read afterwards."""
        self.wait()
        if self._pinned is not None:
            torch.cuda.synchronize(self._io.device)  # loads read rows, too
            self._pinned.close()

    def check_integrity(self) -> None:
        """Free + filed == capacity, no place twice, nothing pinned that is not here."""
        places = [*self._free, *self._index.values()]
        if sorted(places) != list(range(self.capacity)):
            raise IntegrityError(
                f"host tier: {len(places)} places of {self.capacity} accounted for"
            )
        if any(digest not in self._index for digest in (*self._pins, *self._in_flight)):
            raise IntegrityError("host tier: an item in use is not filed")
