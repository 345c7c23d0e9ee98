"""Request rows: which KV slot holds each position, and which state slots a request owns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator
from sglang.srt.mem_cache.integrity import HostSlotList, IntegrityError
from sglang.srt.mem_cache.pool.mamba_pool import MambaPool
from sglang.srt.mem_cache.state_layout import TensorSpec
from sglang.srt.mem_cache.tensor_lists import num_track_entries, req_tensor_specs
from sglang.srt.utils.upload import upload_ids

if TYPE_CHECKING:
    from sglang.srt.configs.mamba_utils import BaseLinearStateParams
    from sglang.srt.mem_cache.req_kv import ReqKV


class HasKV(Protocol):
    """A request as the pools see it."""

    kv: ReqKV


class DisabledSideState:
    """Per-slot side state that our models do not have; every tensor is None."""

    conv_state = None
    intermediate_conv_state = None
    context = None
    intermediate_context = None


class ReqToTokenPool:
    """Owner of request rows ``1 .. size``; row 0 is padding.

    ``req_to_token`` is int32 ``[size + 1, max_context_len]``: the KV slot of each position.
    """

    def __init__(
        self,
        size: int,
        max_context_len: int,
        device: str | torch.device,
        enable_memory_saver: bool = False,
    ) -> None:
        if enable_memory_saver:
            raise ValueError("--enable-memory-saver is not available: drop the flag")
        self.size = size
        self.max_context_len = max_context_len
        self.device = device
        self._rows = HostSlotList(size, "request row")
        self._tensors: dict[str, torch.Tensor] = {}
        for spec in req_tensor_specs(size=size, max_context_len=max_context_len, hybrid=False):
            self._add(spec)
        self.req_to_token = self._tensors["req_to_token"]

    def available_size(self) -> int:
        """Rows that can be handed out now."""
        return self._rows.num_free

    def alloc(self, reqs: list[HasKV]) -> list[int] | None:
        """Give every request without a row one; all or nothing.

        Returns: the rows in the order of ``reqs``, or None (nothing changes) when too few are free.
        """
        without = [req for req in reqs if req.kv.req_pool_idx is None]
        rows = self._rows.take(len(without))
        if rows is None:
            return None
        for req, row in zip(without, rows, strict=True):
            req.kv.req_pool_idx = row
        return [req.kv.req_pool_idx for req in reqs]

    def free(self, req: HasKV) -> None:
        """Take the request's row back. Its state slots stay with it."""
        if req.kv.req_pool_idx is None:
            raise IntegrityError("a request without a row frees its row (double free?)")
        self._rows.give([req.kv.req_pool_idx])
        req.kv.req_pool_idx = None

    def write(self, indices: tuple, values: torch.Tensor) -> None:
        """``req_to_token[indices] = values``, cast to int32."""
        self.req_to_token[indices] = values.to(torch.int32)

    def clear(self) -> None:
        """Take every row back, whoever holds it."""
        self._rows.clear()

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Every device tensor under the name it has in the memory plan."""
        return dict(self._tensors)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless free + held == total for the rows."""
        self._rows.check()

    def _add(self, spec: TensorSpec) -> None:
        dtype = getattr(torch, spec.dtype)
        self._tensors[spec.name] = torch.zeros(spec.shape, dtype=dtype, device=self.device)


class HybridReqToTokenPool(ReqToTokenPool):
    """Request rows of a model with recurrent layers, with the state pool and its slots.

    Each row has one working state slot and, with an extra buffer, one or two track slots. Freeing a
    row does not free its state slots; ``free_mamba_cache`` does.
    """

    mamba_pool_cls = MambaPool

    def __init__(
        self,
        *,
        size: int,
        mamba_size: int,
        mamba_spec_state_size: int,
        max_context_len: int,
        device: str | torch.device,
        enable_memory_saver: bool,
        cache_params: BaseLinearStateParams,
        mamba_layer_ids: list[int],
        enable_mamba_extra_buffer: bool,
        enable_mamba_extra_buffer_lazy: bool = False,
        speculative_num_draft_tokens: int | None = None,
        speculative_eagle_topk: int | None = None,
        enable_overlap_schedule: bool = True,
        start_layer: int | None = None,
        enable_linear_replayssm: bool = False,
        linear_replayssm_cache_len: int = 16,
        mamba_envelope_layout: bool = False,
        enable_linear_replayssm_spec: bool = False,
        enable_linear_lossless_verify: bool = False,
        short_conv_layer_ids: list[int] | None = None,
        short_conv_state_shape: tuple[int, int] | None = None,
        ngram_context_len: int = 0,
        ngram_eos_token_id: int = 0,
        lossless_ring_cells: int | None = None,
    ) -> None:
        super().__init__(size, max_context_len, device, enable_memory_saver)
        refuse_side_state(short_conv_layer_ids, short_conv_state_shape, ngram_context_len)
        self._init_mamba(
            mamba_size=mamba_size,
            spec_state_size=mamba_spec_state_size,
            cache_params=cache_params,
            mamba_layer_ids=mamba_layer_ids,
            enable_mamba_extra_buffer=enable_mamba_extra_buffer,
            enable_mamba_extra_buffer_lazy=enable_mamba_extra_buffer_lazy,
            enable_overlap_schedule=enable_overlap_schedule,
            start_layer=start_layer,
            scratch={
                "speculative_num_draft_tokens": speculative_num_draft_tokens,
                "speculative_eagle_topk": speculative_eagle_topk,
                "enable_linear_replayssm": enable_linear_replayssm,
                "linear_replayssm_cache_len": linear_replayssm_cache_len,
                "envelope_layout": mamba_envelope_layout,
                "enable_linear_replayssm_spec": enable_linear_replayssm_spec,
                "enable_linear_lossless_verify": enable_linear_lossless_verify,
                "lossless_ring_cells": lossless_ring_cells,
            },
        )

    def _init_mamba(
        self,
        *,
        mamba_size: int,
        spec_state_size: int,
        cache_params: BaseLinearStateParams,
        mamba_layer_ids: list[int],
        enable_mamba_extra_buffer: bool,
        enable_mamba_extra_buffer_lazy: bool,
        enable_overlap_schedule: bool,
        start_layer: int | None,
        scratch: dict[str, bool | int | None],
    ) -> None:
        self.mamba_pool = self.mamba_pool_cls(
            size=mamba_size,
            spec_state_size=spec_state_size,
            cache_params=cache_params,
            mamba_layer_ids=mamba_layer_ids,
            device=self.device,
            **scratch,
        )
        self.mamba_allocator = MambaSlotAllocator(mamba_size, self.device)
        self.mamba_map = {layer_id: i for i, layer_id in enumerate(mamba_layer_ids)}
        self.start_layer = 0 if start_layer is None else start_layer
        self.short_conv_pool = DisabledSideState()
        self.ngram_pool = DisabledSideState()
        self.enable_mamba_extra_buffer = enable_mamba_extra_buffer
        self.enable_mamba_extra_buffer_lazy = enable_mamba_extra_buffer_lazy
        self.mamba_ping_pong_track_buffer_size = num_track_entries(
            extra_buffer=enable_mamba_extra_buffer,
            lazy=enable_mamba_extra_buffer_lazy,
            overlap=enable_overlap_schedule,
        )
        num_rows = self.req_to_token.shape[0]
        for spec in req_tensor_specs(
            size=num_rows - 1,
            max_context_len=self.max_context_len,
            track_entries=self.mamba_ping_pong_track_buffer_size,
        )[1:]:
            self._add(spec)
        self.req_index_to_mamba_index_mapping = self._tensors["req_index_to_mamba_index_mapping"]
        self.req_index_to_mamba_ping_pong_mapping = self._tensors.get(
            "req_index_to_mamba_ping_pong_mapping"
        )

    def alloc(self, reqs: list[HasKV]) -> list[int] | None:
        """Give every request a row, a working slot and its track slots; all or nothing.

        What a request holds already (a later chunk of its prompt) is kept. With a lazy extra buffer
        only the first track slot is taken; the second entry is -1 until it is set.
        """
        num_rows = sum(req.kv.req_pool_idx is None for req in reqs)
        eager = min(1, self._entries) if self.enable_mamba_extra_buffer_lazy else self._entries
        wanted = [
            (int(not req.kv.holds_mamba), eager * (req.kv.mamba_ping_pong_track_buffer is None))
            for req in reqs
        ]
        slots = None
        if num_rows <= self.available_size():
            slots = self.mamba_allocator.alloc_ids(sum(map(sum, wanted)))
        if slots is None:
            return None
        rows = super().alloc(reqs)
        for req, (working, track) in zip(reqs, wanted, strict=True):
            taken, slots = slots[: working + track], slots[working + track :]
            if working:
                req.kv.mamba_pool_idx = taken.pop(0)
            if self._entries and req.kv.mamba_ping_pong_track_buffer is None:
                req.kv.mamba_ping_pong_track_buffer = taken + [-1] * (self._entries - track)
                req.kv.mamba_next_track_idx = 0
            self._map_row(req)
        return rows

    def free_mamba_cache(
        self, req: HasKV, mamba_ping_pong_track_buffer_to_keep: int | None = None
    ) -> None:
        """Take back the working slot and all track slots, and clear the request's references.

        ``mamba_ping_pong_track_buffer_to_keep``: entry whose slot has found another owner.
        """
        kv = req.kv
        if kv.holds_mamba:
            self.mamba_allocator.free(kv.mamba_pool_idx)
            kv.mamba_pool_idx = None
        buffer = kv.mamba_ping_pong_track_buffer
        if buffer is not None:
            kept = mamba_ping_pong_track_buffer_to_keep
            self.mamba_allocator.free([s for i, s in enumerate(buffer) if s >= 0 and i != kept])
            kv.mamba_ping_pong_track_buffer = None
        kv.mamba_next_track_idx = None
        kv.mamba_last_track_idx = None
        kv.mamba_last_track_seqlen = None
        kv.mamba_prev_track_seqlen = None

    def clear(self) -> None:
        """Take every row and state slot back, whoever holds them."""
        super().clear()
        self.mamba_allocator.clear()

    def get_mamba_indices(self, req_idx: torch.Tensor) -> torch.Tensor:
        """Working state slots of request rows ``req_idx [n]``: int32 ``[n]``."""
        return self.req_index_to_mamba_index_mapping[req_idx]

    def translate_mamba_indices(self, x: torch.Tensor) -> torch.Tensor:
        """State slots are physical here, so this is the identity."""
        return x

    def mamba2_layer_cache(self, layer_id: int) -> MambaPool.State:
        """State and scratch views of model layer ``layer_id``. Raises: KeyError if it has none."""
        return self.mamba_pool.mamba2_layer_cache(self.mamba_map[layer_id])

    def get_speculative_mamba2_params_all_layers(self) -> MambaPool.SpeculativeState:
        """See ``MambaPool.get_speculative_mamba2_params_all_layers``."""
        return self.mamba_pool.get_speculative_mamba2_params_all_layers()

    def copy_mamba_state(self, src_idx: torch.Tensor, dst_idx: torch.Tensor) -> None:
        """Copy whole states between slots; see ``MambaPool.copy_from``."""
        self.mamba_pool.copy_from(src_idx, dst_idx)

    def get_mamba_ping_pong_other_idx(self, idx: int) -> int:
        """The other entry of the pair, or the only one."""
        return (idx + 1) % self._entries

    def get_mamba_ping_pong_keep_idx(self, next_track_idx: int) -> int:
        """Entry that holds the latest boundary state when ``next_track_idx`` is written next."""
        return self.get_mamba_ping_pong_other_idx(next_track_idx)

    def set_mamba_ping_pong_slot(self, req: HasKV, idx: int, slot: int) -> None:
        """Make ``slot`` (-1: none) the ``idx``-th track slot of the request."""
        req.kv.mamba_ping_pong_track_buffer[idx] = slot
        self._map_row(req)

    def donate_mamba_ping_pong_slot(self, req: HasKV, idx: int, replacement: int = -1) -> int:
        """Hand the ``idx``-th track slot to the caller, who owns it from now on."""
        slot = req.kv.mamba_ping_pong_track_buffer[idx]
        self.set_mamba_ping_pong_slot(req, idx, replacement)
        return slot

    def clone_with_new_mamba(
        self, *, cache_params: BaseLinearStateParams, mamba_layer_ids: list[int], mamba_size: int
    ) -> HybridReqToTokenPool:
        """The same rows with a state pool of their own, for a draft model with recurrent layers.

        Drafts verify nothing, so the lossless flag and the scratch are not passed on.
        """
        clone = object.__new__(type(self))
        vars(clone).update(vars(self))
        clone._tensors = {"req_to_token": self.req_to_token}
        clone._init_mamba(
            mamba_size=mamba_size,
            spec_state_size=0,
            cache_params=cache_params,
            mamba_layer_ids=mamba_layer_ids,
            enable_mamba_extra_buffer=self.enable_mamba_extra_buffer,
            enable_mamba_extra_buffer_lazy=self.enable_mamba_extra_buffer_lazy,
            enable_overlap_schedule=self._entries == 2,
            start_layer=self.start_layer,
            scratch={},
        )
        return clone

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Every device tensor, those of the state pool included."""
        return {**self._tensors, **self.mamba_pool.named_tensors()}

    def check_integrity(self) -> None:
        """Raise IntegrityError when rows, state slots or state tensors do not balance."""
        super().check_integrity()
        self.mamba_allocator.check_integrity()
        self.mamba_pool.check_integrity()

    @property
    def _entries(self) -> int:
        return self.mamba_ping_pong_track_buffer_size

    def _map_row(self, req: HasKV) -> None:
        row = req.kv.req_pool_idx
        # Not ``mapping[row] = number``: that copies from ordinary memory, and so waits for the device.
        self.req_index_to_mamba_index_mapping[row].fill_(req.kv.mamba_pool_idx)
        if self._entries:
            self.req_index_to_mamba_ping_pong_mapping[row] = upload_ids(
                req.kv.mamba_ping_pong_track_buffer, self.device
            )


def refuse_side_state(
    layer_ids: list[int] | None, shape: tuple[int, int] | None, ngram_context_len: int
) -> None:
    """Raise ValueError for side state, which only other model families have."""
    if layer_ids or shape or ngram_context_len:
        raise ValueError(
            "per-layer side state (short_conv_layer_ids, ngram_context_len) belongs to models that "
            "are not supported; leave it empty"
        )
