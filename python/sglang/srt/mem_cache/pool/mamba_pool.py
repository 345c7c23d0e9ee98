"""Recurrent state of linear layers, and the scratch a speculative verify writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sglang.srt.configs.linear_state import dtype_bytes
from sglang.srt.mem_cache.integrity import IntegrityError
from sglang.srt.mem_cache.pool.scratch_rules import (
    check_linear_lossless_verify,
    check_ring_cells,
    get_tensor_size_bytes,
    platform_layout,
)
from sglang.srt.mem_cache.state_layout import (
    REPLAYSSM,
    SNAPSHOTS,
    UPDATE_TUPLES,
    StateLayout,
    TensorSpec,
    total_bytes,
)

if TYPE_CHECKING:
    from sglang.srt.configs.mamba_utils import BaseLinearStateParams

_LISTS = ("conv", "intermediate_conv_window")
_NON_TRANSFER_STATE_FIELDS = frozenset(
    {
        "intermediate_ssm",
        "intermediate_ssm_u",
        "intermediate_ssm_k",
        "intermediate_ssm_g",
        "intermediate_conv_window",
        "replayssm_d",
        "replayssm_k",
        "replayssm_g",
        "replayssm_rawv",
        "replayssm_rawk",
        "replayssm_beta",
    }
)


def _zeros(spec: TensorSpec, device: str | torch.device) -> torch.Tensor:
    return torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=device)


class MambaPool:
    """Owner of conv windows, recurrent states and verify scratch of all linear layers of a rank.

    Shapes (L layers, S = size + 1 slots, R = spec_state_size + 1 rows, D draft tokens):
        conv                       list of ``[L, S, dim, window]``
        temporal                   ``[L, S, HV, V, K]``
        intermediate_conv_window   list of ``[L, R, D, dim, window]``; with shared columns an
                                   overlapping view of ``[L, R, dim, D + window - 1]``
        intermediate_ssm           ``[L, R, D, HV, V, K]`` (snapshots), or None
        intermediate_ssm_u/_k/_g   ``[L, R, D, HV, V]``, ``[L, R, D, HV, K]``, ``[L, R, D, HV]`` fp32
                                   (update tuples), or None

    ``lossless_ring_cells`` replaces D in the update tuples for a deferred commit.
    ``speculative_num_draft_tokens=None`` builds no scratch. Everything starts as zeros. Slot 0 is
    padding. Raises: ValueError for a combination that cannot work, naming the flag.
    """

    conv_window_axis = -1
    _NON_TRANSFER_STATE_FIELDS = _NON_TRANSFER_STATE_FIELDS

    @dataclass(frozen=True, kw_only=True)
    class State:
        """Tensors that belong to state slots."""

        conv: list[torch.Tensor]
        temporal: torch.Tensor
        replayssm_d: torch.Tensor | None = None
        replayssm_k: torch.Tensor | None = None
        replayssm_g: torch.Tensor | None = None
        replayssm_rawv: torch.Tensor | None = None
        replayssm_rawk: torch.Tensor | None = None
        replayssm_beta: torch.Tensor | None = None

        def at_layer_idx(self, layer: int) -> MambaPool.State:
            """The same fields for one layer of the pool, as views."""
            return type(self)(
                **{name: self._pick(name, value, layer) for name, value in self._fields()}
            )

        def mem_usage_bytes(self) -> int:
            """Logical bytes of all fields; shared conv columns count once per window."""
            return sum(
                get_tensor_size_bytes(value) for _, value in self._fields() if value is not None
            )

        def _fields(self) -> Iterator[tuple[str, torch.Tensor | list[torch.Tensor] | None]]:
            for field in dataclasses.fields(self):
                yield field.name, getattr(self, field.name)

        @staticmethod
        def _pick(
            name: str, value: torch.Tensor | list[torch.Tensor] | None, layer: int
        ) -> torch.Tensor | list[torch.Tensor] | None:
            if value is None:
                return None
            return [item[layer] for item in value] if name in _LISTS else value[layer]

    @dataclass(frozen=True, kw_only=True)
    class SpeculativeState(State):
        """State slots together with verify rows."""

        intermediate_ssm: torch.Tensor | None
        intermediate_conv_window: list[torch.Tensor]
        intermediate_ssm_u: torch.Tensor | None = None
        intermediate_ssm_k: torch.Tensor | None = None
        intermediate_ssm_g: torch.Tensor | None = None

    def __init__(
        self,
        *,
        size: int,
        spec_state_size: int,
        cache_params: BaseLinearStateParams,
        mamba_layer_ids: list[int],
        device: str | torch.device,
        enable_memory_saver: bool = False,
        speculative_num_draft_tokens: int | None = None,
        speculative_eagle_topk: int | None = None,
        enable_linear_replayssm: bool = False,
        linear_replayssm_cache_len: int = 16,
        envelope_layout: bool = False,
        enable_linear_replayssm_spec: bool = False,
        enable_linear_lossless_verify: bool = False,
        lossless_ring_cells: int | None = None,
    ) -> None:
        speculative = speculative_num_draft_tokens is not None
        _refuse_unavailable(enable_memory_saver, envelope_layout, enable_linear_replayssm)
        if speculative and enable_linear_lossless_verify:
            check_linear_lossless_verify(
                speculative_eagle_topk=speculative_eagle_topk,
                is_kda=cache_params.is_kda,
                enable_linear_replayssm_spec=enable_linear_replayssm_spec,
            )
            check_ring_cells(lossless_ring_cells, speculative_num_draft_tokens)
        self.size = size
        self.spec_state_size = spec_state_size
        self.device = device
        self.cache_params = cache_params
        self.mamba_layer_ids = list(mamba_layer_ids)
        self.num_mamba_layers = len(self.mamba_layer_ids)
        self.layout: StateLayout = dataclasses.replace(
            platform_layout(cache_params, speculative_eagle_topk, self.conv_window_axis),
            num_layers=self.num_mamba_layers,
        )
        self.speculative_num_draft_tokens = speculative_num_draft_tokens
        self.lossless_ring_cells = lossless_ring_cells
        self.enable_linear_replayssm = enable_linear_replayssm
        self.linear_replayssm_cache_len = linear_replayssm_cache_len
        self.replayssm_is_kda = cache_params.is_kda
        self.replayssm_spec_fold = speculative and enable_linear_replayssm_spec
        self.replayssm_write_pos = None
        self.replayssm_spec_write_pos = None
        self.replayssm_cache_base = None
        self.replayssm_is_flush = None
        self._slot_siblings: list[object] = []
        self.scratch_kind = _scratch_kind(
            lossless=enable_linear_lossless_verify, replayssm=enable_linear_replayssm_spec
        )
        self._tensors: dict[str, torch.Tensor] = {}
        self._intermediate_conv_window_phys: list[torch.Tensor] = []
        state = self._build_state()
        self.mamba_cache = self._build_scratch(state) if speculative else self.State(**state)
        self.mem_usage = total_bytes(self.specs()) / (1 << 30)

    def specs(self) -> list[TensorSpec]:
        """Every physical tensor of the pool, in the order of allocation."""
        specs = self.layout.state_tensors(self.size + 1)
        if self.replayssm_spec_fold:
            specs += self.layout.replayssm_ring_tensors(
                slots=self.size + 1, record_len=self.linear_replayssm_cache_len
            )
        if self.speculative_num_draft_tokens is not None:
            specs += self.layout.scratch_tensors(
                kind=self.scratch_kind,
                rows=self.spec_state_size + 1,
                draft_tokens=self.speculative_num_draft_tokens,
                ring_cells=self.lossless_ring_cells,
            )
        return specs

    def _build_state(self) -> dict[str, torch.Tensor | list[torch.Tensor]]:
        specs = self.layout.state_tensors(self.size + 1)
        if self.replayssm_spec_fold:
            ring = self.layout.replayssm_ring_tensors(
                slots=self.size + 1, record_len=self.linear_replayssm_cache_len
            )
            specs += ring
        for spec in specs:
            self._tensors[spec.name] = _zeros(spec, self.device)
        state: dict[str, torch.Tensor | list[torch.Tensor]] = {
            name: tensor for name, tensor in self._tensors.items() if "." not in name
        }
        state["conv"] = [self._tensors[f"conv.{i}"] for i in range(len(self.layout.conv))]
        return state

    def _build_scratch(
        self, state: dict[str, torch.Tensor | list[torch.Tensor]]
    ) -> SpeculativeState:
        rows, draft_tokens = self.spec_state_size + 1, self.speculative_num_draft_tokens
        views = []
        windows = self.layout.conv_window_tensors(rows=rows, draft_tokens=draft_tokens)
        for spec, shape in zip(windows, self.layout.conv, strict=True):
            if self.layout.dedup:
                physical, view = self._allocate_deduplicated_conv_window(
                    conv_shape=shape,
                    num_mamba_layers=self.num_mamba_layers,
                    spec_state_size=self.spec_state_size,
                    speculative_num_draft_tokens=draft_tokens,
                    conv_dtype=self.cache_params.dtype.conv,
                )
            else:
                physical = view = _zeros(spec, self.device)
            self._tensors[spec.name] = physical
            views.append(view)
            self._intermediate_conv_window_phys.append(physical)
        if not self.layout.dedup:
            views = self._intermediate_conv_window_phys
        ssm: dict[str, torch.Tensor | None] = {"intermediate_ssm": None}
        for spec in self.layout.ssm_scratch_tensors(
            kind=self.scratch_kind,
            rows=rows,
            draft_tokens=draft_tokens,
            ring_cells=self.lossless_ring_cells,
        ):
            ssm[spec.name] = self._tensors[spec.name] = _zeros(spec, self.device)
        return self.SpeculativeState(**state, intermediate_conv_window=views, **ssm)

    def _allocate_deduplicated_conv_window(
        self,
        *,
        conv_shape: tuple[int, int],
        num_mamba_layers: int,
        spec_state_size: int,
        speculative_num_draft_tokens: int,
        conv_dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocate one buffer per conv type in which step ``d``'s window starts at column ``d``.

        Returns: the physical ``[L, R, *shape with the window widened to D + window - 1]`` and the
        logical ``[L, R, D, *conv_shape]`` view, whose step stride is its window stride.
        """
        device = self.device if "device" in vars(self) else torch.get_default_device()
        axis = self.conv_window_axis % len(conv_shape)
        physical_shape = list(conv_shape)
        physical_shape[axis] += speculative_num_draft_tokens - 1
        physical = torch.zeros(
            (num_mamba_layers, spec_state_size + 1, *physical_shape),
            dtype=conv_dtype,
            device=device,
        )
        strides = physical.stride()
        view = physical.as_strided(
            (num_mamba_layers, spec_state_size + 1, speculative_num_draft_tokens, *conv_shape),
            (*strides[:2], strides[2 + axis], *strides[2:]),
        )
        return physical, view

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Every physical tensor under the name it has in the memory plan."""
        return dict(self._tensors)

    def get_speculative_mamba2_params_all_layers(self) -> SpeculativeState:
        """All layers' state and scratch; asserts that the pool was built for speculation."""
        assert isinstance(self.mamba_cache, self.SpeculativeState), "the pool has no verify scratch"
        return self.mamba_cache

    def mamba2_layer_cache(self, layer_idx: int) -> State:
        """One layer's views; ``layer_idx`` counts the layers of the pool."""
        return self.mamba_cache.at_layer_idx(layer_idx)

    def clear_slots(self, idx: torch.Tensor) -> None:
        """Zero the state of slots ``idx [n]`` in every layer."""
        for tensor in self._slot_tensors():
            tensor.index_fill_(1, idx.long(), 0)  # an assignment would wait for the device

    def copy_from(self, src_idx: torch.Tensor, dst_idx: torch.Tensor) -> None:
        """Copy the state of slots ``src_idx [n]`` to ``dst_idx [n]`` in every layer."""
        for tensor in self._slot_tensors():
            tensor[:, dst_idx] = tensor[:, src_idx]

    def get_cpu_copy(self, idx: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Host copies of slots ``idx [n]``: conv tensors and recurrent state, never scratch."""
        conv = [tensor[:, idx].cpu() for tensor in self.mamba_cache.conv]
        return conv, self.mamba_cache.temporal[:, idx].cpu()

    def load_cpu_copy(
        self, copy: tuple[list[torch.Tensor], torch.Tensor], idx: torch.Tensor
    ) -> None:
        """Write what ``get_cpu_copy`` returned into slots ``idx [n]``."""
        conv, temporal = copy
        for tensor, saved in zip(self.mamba_cache.conv, conv, strict=True):
            tensor[:, idx] = saved.to(tensor.device)
        target = self.mamba_cache.temporal
        target[:, idx] = temporal.to(target.device)

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """What a state transfer sends, per tensor and layer: addresses, bytes, bytes of one slot."""
        layers = [tensor for tensor, _, _ in self._transfer_layers()]
        return (
            [tensor.data_ptr() for tensor in layers],
            [tensor.nbytes for tensor in layers],
            [tensor[0].nbytes for tensor in layers],
        )

    def get_state_dim_per_tensor(self) -> list[int]:
        """For each entry of ``get_contiguous_buf_infos``, the size of the axis that TP splits."""
        return [tensor.shape[axis] for tensor, axis, _ in self._transfer_layers()]

    def get_state_layer_ids(self) -> list[int]:
        """For each entry of ``get_contiguous_buf_infos``, the model's layer id."""
        return [layer_id for _, _, layer_id in self._transfer_layers()]

    def get_kv_size_bytes(self) -> int:
        """Bytes of all physical tensors, scratch included."""
        return total_bytes(self.specs())

    def check_integrity(self) -> None:
        """Raise IntegrityError when a tensor is missing or not of the shape the formula gives."""
        for spec in self.specs():
            tensor = self._tensors.get(spec.name)
            if tensor is None or tuple(tensor.shape) != spec.shape:
                actual = None if tensor is None else tuple(tensor.shape)
                raise IntegrityError(f"state pool: {spec.name} is {actual}, built as {spec.shape}")
            if tensor.element_size() != dtype_bytes(spec.dtype):
                raise IntegrityError(f"state pool: {spec.name} is {tensor.dtype}, not {spec.dtype}")

    def _transfer_state(self) -> Iterator[tuple[torch.Tensor, int]]:
        """Tensors that follow a request to another host, with the TP-split axis of one layer."""
        for field in dataclasses.fields(self.mamba_cache):
            if field.name in _NON_TRANSFER_STATE_FIELDS:
                continue
            value = getattr(self.mamba_cache, field.name)
            if field.name == "conv":
                axis = 1 + self.cache_params.shape.conv_slice_axis
                yield from ((tensor, axis) for tensor in value)
            elif value is not None:
                yield value, 1

    def _transfer_layers(self) -> Iterator[tuple[torch.Tensor, int, int]]:
        for tensor, axis in self._transfer_state():
            for layer, layer_id in enumerate(self.mamba_layer_ids):
                yield tensor[layer], axis, layer_id

    def _slot_tensors(self) -> list[torch.Tensor]:
        """Tensors whose second axis is the state slot."""
        ring = [tensor for name, tensor in self._tensors.items() if name.startswith("replayssm_")]
        return [*self.mamba_cache.conv, self.mamba_cache.temporal, *ring]


def _scratch_kind(*, lossless: bool, replayssm: bool) -> str:
    if replayssm:
        return REPLAYSSM
    return UPDATE_TUPLES if lossless else SNAPSHOTS


def _refuse_unavailable(memory_saver: bool, envelope_layout: bool, replayssm: bool) -> None:
    wanted = (
        (memory_saver, "--enable-memory-saver"),
        (envelope_layout, "--enable-page-major-kv-layout"),
        (replayssm, "--enable-linear-replayssm"),
    )
    if named := [flag for asked, flag in wanted if asked]:
        raise ValueError(f"{', '.join(named)} is not available: drop the flag")
