"""Rows of activations in FP8."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FP8_DTYPE = torch.float8_e4m3fn
FP8_MAX = 448.0
GROUP = 128
"""Width of a scale block along K (activations and weights) and along N (weights)."""


def num_groups(length: int) -> int:
    return -(-length // GROUP)


@dataclass(frozen=True)
class QuantizedRows:
    """Rows that FP8 maps read: ``values * scale`` of each group of 128 columns.

    values  [M, K] e4m3, contiguous
    scale   [M, ceil(K / 128)] fp32, contiguous; max|x| / 448 of the group, 1 where all are zero
    dtype   of the rows they stand for, which is that of the maps' results
    """

    values: Tensor
    scale: Tensor
    dtype: torch.dtype

    @staticmethod
    def empty(
        num_rows: int, num_columns: int, *, dtype: torch.dtype, device: torch.device
    ) -> QuantizedRows:
        return QuantizedRows(
            torch.empty((num_rows, num_columns), dtype=FP8_DTYPE, device=device),
            torch.empty((num_rows, num_groups(num_columns)), dtype=torch.float32, device=device),
            dtype,
        )

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def device(self) -> torch.device:
        return self.values.device


@dataclass(frozen=True)
class NormedRows:
    """One norm's rows in the forms that its readers asked for.

    plain      [T, H], for maps that are not FP8
    quantized  of the same rows, for those that are
    """

    plain: Tensor | None
    quantized: QuantizedRows | None

    def as_plain(self) -> Tensor:
        """Raises: ValueError if no reader asked for plain rows."""
        if self.plain is None:
            raise ValueError("the norm made FP8 rows only: its readers' RowForms lack PLAIN")
        return self.plain

    def best(self) -> Tensor | QuantizedRows:
        """FP8 rows where they exist: an FP8 map would make them itself."""
        return self.as_plain() if self.quantized is None else self.quantized
