"""The one formula for recurrent-state memory: every tensor of the pool by name, shape and dtype.

The pool allocates exactly this list and the planner adds it up, so the two cannot drift. No torch.

Axes: ``L`` linear layers, ``S`` state slots (slot 0 is padding), ``R`` verify rows, ``D`` draft tokens,
``HV`` value heads, ``V``/``K`` head dims.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from sglang.srt.configs.linear_state import dtype_bytes

if TYPE_CHECKING:
    from sglang.srt.configs.mamba_utils import BaseLinearStateParams

SNAPSHOTS = "snapshots"
UPDATE_TUPLES = "update_tuples"
REPLAYSSM = "replayssm"
MAX_RING_CELLS = 64
"""Longest tuple ring: a deferred commit marks the cells that end one in a mask of 64 bits."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor: its name in the plan, its physical shape, and the name of its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * dtype_bytes(self.dtype)


def total_bytes(specs: tuple[TensorSpec, ...] | list[TensorSpec]) -> int:
    """Bytes of all tensors together, without any allocator's rounding."""
    return sum(spec.nbytes for spec in specs)


@dataclass(frozen=True)
class StateLayout:
    """Geometry of the state of ``num_layers`` linear layers on one rank.

    ``conv`` lists two-dimensional window shapes whose window axis is ``conv_window_axis``;
    ``dedup`` says that consecutive windows of one verify share their columns.
    """

    num_layers: int
    conv: tuple[tuple[int, int], ...]
    temporal: tuple[int, int, int]
    conv_dtype: str
    temporal_dtype: str
    num_k_heads: int = 1
    dedup: bool = True
    is_kda: bool = False
    conv_window_axis: int = -1

    @staticmethod
    def from_cache_params(
        params: BaseLinearStateParams, *, dedup: bool = True, conv_window_axis: int = -1
    ) -> StateLayout:
        """Read the parameters a pool is built from; ``dedup`` is what the platform allows."""
        return StateLayout(
            num_layers=len(params.layers),
            conv=tuple(tuple(shape) for shape in params.shape.conv),
            temporal=tuple(params.shape.temporal),
            conv_dtype=str(params.dtype.conv).removeprefix("torch."),
            temporal_dtype=str(params.dtype.temporal).removeprefix("torch."),
            num_k_heads=params.shape.num_k_heads_per_tp,
            dedup=dedup and not params.shape.disable_conv_window_dedup,
            is_kda=params.is_kda,
            conv_window_axis=conv_window_axis,
        )

    def state_tensors(self, slots: int) -> list[TensorSpec]:
        """Persistent state of ``slots`` slots, the padding slot included."""
        lead = (self.num_layers, slots)
        conv = [
            TensorSpec(f"conv.{i}", (*lead, *shape), self.conv_dtype)
            for i, shape in enumerate(self.conv)
        ]
        return [*conv, TensorSpec("temporal", (*lead, *self.temporal), self.temporal_dtype)]

    def slot_bytes(self) -> int:
        """Bytes of one slot over all layers."""
        return total_bytes(self.state_tensors(1))

    def conv_window_tensors(self, *, rows: int, draft_tokens: int) -> list[TensorSpec]:
        """Physical conv-window scratch: shared columns with ``dedup``, else one window per step."""
        specs = []
        for i, shape in enumerate(self.conv):
            if self.dedup:
                physical = list(shape)
                physical[self.conv_window_axis] += draft_tokens - 1
            else:
                physical = [draft_tokens, *shape]
            name = f"intermediate_conv_window.{i}"
            specs.append(TensorSpec(name, (self.num_layers, rows, *physical), self.conv_dtype))
        return specs

    def ssm_scratch_tensors(
        self, *, kind: str, rows: int, draft_tokens: int, ring_cells: int | None = None
    ) -> list[TensorSpec]:
        """What a verify records of the recurrence. Update tuples are fp32 whatever the state is.

        ``ring_cells`` is the length of the tuple ring where accepted tuples wait for a later verify
        (deferred commit); by default it is ``draft_tokens``.
        """
        cells = ring_cells if ring_cells is not None and kind == UPDATE_TUPLES else draft_tokens
        lead = (self.num_layers, rows, cells)
        heads, v_dim, k_dim = self.temporal
        if kind == REPLAYSSM:
            return []
        if kind == SNAPSHOTS:
            return [TensorSpec("intermediate_ssm", (*lead, *self.temporal), self.temporal_dtype)]
        if kind == UPDATE_TUPLES:
            return [
                TensorSpec("intermediate_ssm_u", (*lead, heads, v_dim), "float32"),
                TensorSpec("intermediate_ssm_k", (*lead, heads, k_dim), "float32"),
                TensorSpec("intermediate_ssm_g", (*lead, heads), "float32"),
            ]
        raise ValueError(f"verify scratch {kind!r} is unknown")

    def scratch_tensors(
        self, *, kind: str, rows: int, draft_tokens: int, ring_cells: int | None = None
    ) -> list[TensorSpec]:
        """All verify scratch of ``rows`` rows."""
        return [
            *self.conv_window_tensors(rows=rows, draft_tokens=draft_tokens),
            *self.ssm_scratch_tensors(
                kind=kind, rows=rows, draft_tokens=draft_tokens, ring_cells=ring_cells
            ),
        ]

    def scratch_row_bytes(
        self, *, kind: str, draft_tokens: int, ring_cells: int | None = None
    ) -> int:
        """Bytes of one verify row over all layers."""
        return total_bytes(
            self.scratch_tensors(
                kind=kind, rows=1, draft_tokens=draft_tokens, ring_cells=ring_cells
            )
        )

    def replayssm_ring_tensors(self, *, slots: int, record_len: int) -> list[TensorSpec]:
        """ReplaySSM ring: raw inputs of the last ``record_len`` steps of every slot."""
        lead = (self.num_layers, slots, record_len)
        heads, v_dim, k_dim = self.temporal
        gate = (*lead, heads, k_dim) if self.is_kda else (*lead, heads)
        return [
            TensorSpec("replayssm_rawv", (*lead, heads, v_dim), self.conv_dtype),
            TensorSpec("replayssm_rawk", (*lead, self.num_k_heads, k_dim), self.conv_dtype),
            TensorSpec("replayssm_g", gate, "float32"),
            TensorSpec("replayssm_beta", (*lead, heads), "float32"),
        ]
