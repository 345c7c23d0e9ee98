"""What DFLASH and DSPARK share: draft KV over tapped target features, one draft pass a step.

Context keys and values depend on the target alone. They are written once per committed token, to the
token's own slot, and so the prefix cache covers them. The block's own keys and values go to the
slots after the context, which the verify has reserved; the next commit overwrites them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, MHATokenToKVPool
from sglang.srt.model_executor.batch_tensors import make_forward_batch
from sglang.srt.model_executor.decode_rows import NOBODY, DecodeRows
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    LogitsOutput,
)
from sglang.srt.models.dflash import DFlashDraftModel
from sglang.srt.models.hybrid_gdn import max_position
from sglang.srt.speculative.drafter import DraftBatch
from sglang.srt.utils.upload import upload_ids


class BlockRunner:
    """A block draft model over its own KV pool."""

    capture_hidden = CaptureHiddenMode.NULL

    def __init__(
        self,
        model: DFlashDraftModel,
        *,
        req_pool: HybridReqToTokenPool,
        kv_pool: MHATokenToKVPool,
    ) -> None:
        self.model = model
        self.device = req_pool.req_to_token.device
        if self.device.type != "cpu":
            model.rotary.reserve(req_pool.max_context_len)
        self._req_pool = req_pool
        self._kv_pool = kv_pool

    def run_block(self, batch: DraftBatch, num_rows: int, *, skip: int) -> tuple[Tensor, Tensor]:
        """Run ``[bonus, MASK, ...]`` at positions L, L+1, ...; see ``draft_rows`` for the result."""
        num_requests = len(batch.rows)
        ids = torch.full(
            (num_requests, num_rows), self.model.mask_token_id, dtype=torch.long, device=self.device
        )
        ids[:, 0] = batch.bonus
        fb = make_forward_batch(
            ForwardMode.DRAFT_EXTEND,
            req_pool=self._req_pool,
            rows=batch.rows,
            prefix_lens=batch.prefix_lens,
            query_lens=[num_rows] * num_requests,
            input_ids=ids.reshape(-1),
            with_state=False,
        )
        self.model.attn_backend.init_forward_metadata(fb)
        return self.model.draft_rows(fb, skip=skip)

    def run_block_rows(
        self, rows: DecodeRows, num_rows: int, *, skip: int
    ) -> tuple[Tensor, Tensor]:
        """``run_block`` of fixed shapes, without the host."""
        ids = torch.full(
            (rows.num_requests, num_rows),
            self.model.mask_token_id,
            dtype=torch.long,
            device=self.device,
        )
        ids[:, 0] = rows.bonus
        fb = rows.batch(
            ForwardMode.DRAFT_EXTEND, width=num_rows, input_ids=ids.reshape(-1), with_state=False
        )
        self.model.attn_backend.init_forward_metadata(fb)
        return self.model.draft_rows(fb, skip=skip)

    def write_prefill(self, fb: ForwardBatch, output: LogitsOutput) -> None:
        """Context KV of all rows of a prefill."""
        self._write(fb, _taps(output), fb.positions, fb.out_cache_loc)

    def write_accepted(
        self, fb: ForwardBatch, output: LogitsOutput, num_correct: list[int]
    ) -> None:
        """Context KV of the accepted rows of a verify of chains."""
        width = fb.query_lens_cpu[0]
        taps, positions, slots = _taps(output), fb.positions, fb.out_cache_loc
        if min(num_correct) + 1 < width:
            index = upload_ids(
                [r * width + i for r, count in enumerate(num_correct) for i in range(count + 1)],
                self.device,
            )
            taps, positions, slots = taps[index], positions[index], slots[index]
        self._write(fb, taps, positions, slots)

    def write_accepted_rows(
        self, fb: ForwardBatch, output: LogitsOutput, width: int, correct: Tensor
    ) -> None:
        """``write_accepted`` of fixed shapes: rejected rows have no slot, so nothing stores them."""
        is_accepted = torch.arange(width, device=self.device) <= correct.unsqueeze(1)
        slots = torch.where(is_accepted.reshape(-1), fb.out_cache_loc, NOBODY)
        self._write(fb, _taps(output), fb.positions, slots)

    def _write(self, fb: ForwardBatch, taps: Tensor, positions: Tensor, slots: Tensor) -> None:
        def store(layer: int, k: Tensor, v: Tensor) -> None:
            self._kv_pool.set_kv_buffer(layer, slots, k, v)

        self.model.write_context(taps, positions, store, end_position=max_position(fb) + 1)


def _taps(output: LogitsOutput) -> Tensor:
    if output.taps is None:
        raise ValueError("the target returned no taps; ForwardBatch.capture_layer_ids was empty")
    return output.taps
