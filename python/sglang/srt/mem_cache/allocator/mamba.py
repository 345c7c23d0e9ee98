"""Owner of recurrent-state slots."""

from __future__ import annotations

import torch

from sglang.srt.mem_cache.integrity import HostSlotList
from sglang.srt.utils.upload import upload_ids


class MambaSlotAllocator:
    """Hands out state slots ``1 .. size``; slot 0 is padding.

    The books are on the host; ``alloc`` returns a tensor on ``device`` for callers that index with
    it, ``alloc_ids`` plain integers.
    """

    def __init__(self, size: int, device: str | torch.device) -> None:
        self.size = size
        self.device = device
        self._slots = HostSlotList(size, "state slot")

    def available_size(self) -> int:
        """Slots that can be handed out now."""
        return self._slots.num_free

    def alloc_ids(self, n: int) -> list[int] | None:
        """Hand out ``n`` slots as integers, or None (nothing changes) when too few are free."""
        return self._slots.take(n)

    def alloc(self, n: int) -> torch.Tensor | None:
        """Hand out ``n`` slots: int64 ``[n]`` on the device, or None when too few are free."""
        ids = self._slots.take(n)
        return None if ids is None else upload_ids(ids, self.device)

    def free(self, idx: torch.Tensor | list[int] | int) -> None:
        """Take slots back. Raises IntegrityError naming a slot that is not held."""
        if isinstance(idx, torch.Tensor):
            idx = idx.reshape(-1).tolist()
        self._slots.give([idx] if isinstance(idx, int) else list(idx))

    def is_held(self, slot: int) -> bool:
        """True when ``slot`` is handed out."""
        return self._slots.is_held(slot)

    def clear(self) -> None:
        """Take every slot back, whoever holds it."""
        self._slots.clear()

    def check_integrity(self) -> None:
        """Raise IntegrityError unless free + held == total and no slot is listed twice."""
        self._slots.check()
