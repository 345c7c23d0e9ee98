"""The values that enter and leave one call of a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from torch import Tensor


class ForwardMode(Enum):
    """What the rows of a call are. Only TARGET_VERIFY leaves the recurrent states alone."""

    EXTEND = auto()
    DECODE = auto()
    TARGET_VERIFY = auto()
    DRAFT_EXTEND = auto()
    IDLE = auto()

    def is_extend(self) -> bool:
        """True for prompt chunks of target or draft: several rows a request, states advance."""
        return self in (ForwardMode.EXTEND, ForwardMode.DRAFT_EXTEND)

    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE

    def is_target_verify(self) -> bool:
        return self is ForwardMode.TARGET_VERIFY

    def is_draft_extend_v2(self) -> bool:
        """True for the draft model's catch-up rows, which touch no recurrent state."""
        return self is ForwardMode.DRAFT_EXTEND

    def is_idle(self) -> bool:
        return self is ForwardMode.IDLE


class CaptureHiddenMode(Enum):
    """Which post-final-norm hidden states a call returns: none, those of logits_rows, all rows."""

    NULL = auto()
    LAST = auto()
    FULL = auto()


@dataclass
class ForwardBatch:
    """R requests with T rows (tokens) in all; tensors live on the model's device.

    Request r covers positions ``prefix_lens[r] .. prefix_lens[r] + query_lens[r] - 1``;
    ``req_to_token[req_pool_indices[r], pos]`` already holds the KV slots of all of them.

    input_ids            [T] int64
    positions            [T] int64
    req_pool_indices     [R] int64
    prefix_lens          [R] int64, tokens in KV and state before this call
    query_lens           [R] int64
    query_start_loc      [R+1] int32, exclusive sum of query_lens
    out_cache_loc        [T] int64, KV slot each row writes
    mamba_cache_indices  [R] int32, working state slot, -1 skips; None for a model without GDN layers
    mamba_track_indices  [R] int64, slot for a boundary state, -1 none
    mamba_track_rows     [R] int64, EXTEND/DECODE: store the state after so many rows, -1 none
    mamba_track_rows_cpu the same on the host
    logits_rows          [M] int64, rows whose logits are wanted; None means all
    spec_hidden          [T, H], hidden input of an MTP model
    tree_parents         [R, D] int64, TARGET_VERIFY of trees: row that each row continues, -1 for the
                         bonus and for padding; None for chains
    tree_levels          the same by depth, see layers/attention/linear/gdn_tree.py
    tree_mask            [R, D, D] bool, with tree_parents: which rows of the call a row attends to
    """

    forward_mode: ForwardMode
    input_ids: Tensor
    positions: Tensor
    req_pool_indices: Tensor
    prefix_lens: Tensor
    query_lens: Tensor
    query_start_loc: Tensor
    out_cache_loc: Tensor
    mamba_cache_indices: Tensor | None = None
    mamba_track_indices: Tensor | None = None
    mamba_track_rows: Tensor | None = None
    mamba_track_rows_cpu: list[int] | None = None
    logits_rows: Tensor | None = None
    capture_hidden: CaptureHiddenMode = CaptureHiddenMode.NULL
    capture_layer_ids: tuple[int, ...] = ()
    draft_token_num: int = 0
    spec_hidden: Tensor | None = None
    tree_parents: Tensor | None = None
    tree_mask: Tensor | None = None
    tree_levels: tuple[tuple[Tensor, Tensor, Tensor], ...] = ()
    prefix_lens_cpu: list[int] = field(default_factory=list)
    query_lens_cpu: list[int] = field(default_factory=list)

    @property
    def batch_size(self) -> int:
        return self.req_pool_indices.shape[0]

    @property
    def num_rows(self) -> int:
        return self.input_ids.shape[0]


@dataclass
class LogitsOutput:
    """scores [M, vocab] as the head gives them; hidden [M or T, H] as captured; taps [T, F*H] of F layers.

    The best token of a row is the same in ``scores`` and in ``logits``, which may be a copy.
    """

    scores: Tensor
    hidden: Tensor | None = None
    taps: Tensor | None = None

    @property
    def logits(self) -> Tensor:
        """[M, vocab] fp32; ``scores`` itself if it is that already."""
        return self.scores.float()
