"""Pages and states as flat byte rows: the form in which they leave the device and come back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sglang.srt.utils.upload import upload


class BlobIO:
    """Packs items of a pool into uint8 rows and unpacks them.

    tensors         every tensor that an item has a part in
    slot_axis       axis of the slots: 0 for KV (``[slots, heads, dim]``), 1 for states (``[L, S, ...]``)
    slots_per_item  slots of one item: the page size for KV, 1 for states
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], *, slot_axis: int, slots_per_item: int
    ) -> None:
        if not tensors:
            raise ValueError("a tier needs at least one tensor to copy")
        self._tensors = list(tensors)
        self._axis = slot_axis
        self._slots_per_item = slots_per_item
        self.device = tensors[0].device
        self._part_bytes = [
            t.numel() // t.shape[slot_axis] * slots_per_item * t.element_size() for t in tensors
        ]
        self.item_bytes = sum(self._part_bytes)

    def describe(self) -> str:
        """Layout of an item; two pools with the same text can exchange rows."""
        parts = [
            f"{tuple(n for i, n in enumerate(t.shape) if i != self._axis)}:{t.dtype}"
            for t in self._tensors
        ]
        return f"{self._slots_per_item}x[{','.join(parts)}]"

    def _index(self, slots: np.ndarray) -> torch.Tensor:
        return upload(slots.astype(np.int64), self.device)

    def pack(self, slots: np.ndarray) -> torch.Tensor:
        """Rows ``[items, item_bytes]`` on the device, a copy ordered after earlier work there.

        ``slots``: int64 ``[items * slots_per_item]``, item by item.
        """
        num_items = len(slots) // self._slots_per_item
        index = self._index(slots)
        parts = []
        for tensor in self._tensors:
            part = tensor.index_select(self._axis, index).movedim(self._axis, 0).contiguous()
            parts.append(part.reshape(num_items, -1).view(torch.uint8))
        return torch.cat(parts, dim=1)

    def unpack(self, rows: torch.Tensor, slots: np.ndarray) -> None:
        """Write rows ``[items, item_bytes]``, on the device, into ``slots``."""
        index = self._index(slots)
        at = 0
        for tensor, size in zip(self._tensors, self._part_bytes):
            # A slice may be misaligned for the dtype; a clone never is.
            part = rows[:, at : at + size].clone(memory_format=torch.contiguous_format)
            shape = [n for i, n in enumerate(tensor.shape) if i != self._axis]
            values = part.view(tensor.dtype).reshape(len(slots), *shape)
            tensor.index_copy_(self._axis, index, values.movedim(0, self._axis))
            at += size
