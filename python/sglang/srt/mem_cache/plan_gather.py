"""Everything that is fixed before a memory budget is divided. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.arg_groups.basic_hook import DEFAULT_MAX_RUNNING
from sglang.srt.configs.draft_config import DraftConfig
from sglang.srt.configs.model_config import FULL_ATTENTION, LINEAR_ATTENTION, ModelConfig
from sglang.srt.mem_cache.plan_inputs import (
    DraftNeeds,
    KVGeometry,
    MemoryPlanError,
    draft_needs,
    kv_geometry,
    request_slot_ratio,
    stage_counts,
    state_layout,
    target_weight_size,
)
from sglang.srt.mem_cache.state_layout import (
    MAX_RING_CELLS,
    UPDATE_TUPLES,
    StateLayout,
    TensorSpec,
    total_bytes,
)
from sglang.srt.mem_cache.tensor_lists import num_track_entries, req_tensor_specs

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

DEFERRED_RING_CELLS = 16
"""Least length of the tuple ring of a deferred commit; it holds two of the widest verifies at least."""
LEAST_MAMBA_SHARE, MOST_MAMBA_SHARE = 1e-6, 1e6
"""Range of ``--mamba-full-memory-ratio`` in which the division of a budget is exact."""
STEPS_AHEAD = 2
"""Steps whose rows a request may hold at once: the one in flight and the next."""
ROW_SLACK = 4
"""Positions a request row has beyond the context and the rows of steps."""


@dataclass(frozen=True)
class PlanInputs:
    """Everything that is fixed before the budget is divided."""

    model: ModelConfig
    args: ServerArgs
    memory: int
    draft_tokens: int | None
    draft: DraftNeeds
    layout: StateLayout
    kv: KVGeometry
    weight_bytes: int
    max_running: int
    page_size: int
    row_tokens: int
    track_entries: int
    ratio: int
    context: int

    @property
    def verifies(self) -> bool:
        """Whether this worker records verify scratch; a prefill server never verifies."""
        return self.draft_tokens is not None and self.args.disaggregation_mode != "prefill"

    @property
    def bytes_per_token(self) -> int:
        draft = self.draft.kv
        return self.kv.bytes_per_token + (draft.bytes_per_token if draft is not None else 0)

    @property
    def attention_shapes(self) -> list[tuple[int, int]]:
        """(query heads of this rank, head dim) of the target and of a drafter that attends."""
        shapes = [(self.model.num_attention_heads // self.args.tp_size, self.model.head_dim)]
        if self.draft.kv is not None:
            shapes.append((self.draft.query_heads, self.draft.kv.head_dim))
        return shapes

    @property
    def row_bytes(self) -> int:
        return total_bytes(self.row_tensors(self.max_running))

    def row_tensors(self, num_requests: int) -> list[TensorSpec]:
        return req_tensor_specs(
            size=num_requests, max_context_len=self.row_tokens, track_entries=self.track_entries
        )

    def scratch_row(self, kind: str) -> int:
        """Bytes one verify row really takes."""
        if not self.verifies:
            return 0
        return self.layout.scratch_row_bytes(
            kind=kind, draft_tokens=self.draft_tokens, ring_cells=self.ring_cells
        )

    @property
    def ring_cells(self) -> int | None:
        """Cells of the tuple ring of a deferred commit; None commits at once and needs no more."""
        if not self.verifies or self.args.linear_lossless_commit != "deferred":
            return None
        return max(2 * self.draft_tokens, DEFERRED_RING_CELLS)

    def charged_row(self, kind: str) -> int:
        """Bytes one verify row is charged.

        Snapshots keep their customary price of one whole state per configured draft token, unless
        the rows really take more (adaptive widths).
        """
        allocated = self.scratch_row(kind)
        if kind == UPDATE_TUPLES or not self.verifies:
            return allocated
        stock = self.layout.slot_bytes() * self.args.speculative_num_draft_tokens
        return max(allocated, stock)


def gather(
    model: ModelConfig, args: ServerArgs, memory: int, draft_config: DraftConfig | None
) -> PlanInputs:
    page = args.page_size
    draft_tokens = args.max_speculative_num_draft_tokens()
    _check_flags(model, args, draft_tokens)
    draft = draft_needs(model, draft_config, args, draft_tokens)
    context = args.context_length or model.max_position_embeddings
    tail = max(draft.tail_tokens, STEPS_AHEAD * (draft_tokens or 1))
    row_tokens = -(-(context + tail + ROW_SLACK) // page) * page
    topk = args.speculative_eagle_topk
    extra_buffer = args.mamba_radix_cache_strategy in ("extra_buffer", "extra_buffer_lazy")
    return PlanInputs(
        model=model,
        args=args,
        memory=memory,
        draft_tokens=draft_tokens,
        draft=draft,
        layout=state_layout(
            model,
            args,
            num_layers=stage_counts(model, args.pp_size, LINEAR_ATTENTION),
            chain=topk is None or topk <= 1,
        ),
        kv=kv_geometry(model, args, stage_counts(model, args.pp_size, FULL_ATTENTION)),
        weight_bytes=target_weight_size(model, args).nbytes,
        max_running=args.max_running_requests or DEFAULT_MAX_RUNNING.get(args.device, 128),
        page_size=page,
        row_tokens=row_tokens,
        track_entries=num_track_entries(
            extra_buffer=extra_buffer and not args.disable_radix_cache,
            lazy=args.mamba_radix_cache_strategy == "extra_buffer_lazy",
            overlap=not args.disable_overlap_schedule,
        ),
        ratio=request_slot_ratio(args),
        context=context,
    )


def _check_flags(model: ModelConfig, args: ServerArgs, draft_tokens: int | None) -> None:
    """Raise MemoryPlanError for values with which nothing below would make sense."""
    if args.page_size is None or "auto" in (args.device, args.dtype):
        raise MemoryPlanError(
            "the server arguments are not resolved: run_resolution_pipeline decides --page-size, "
            "--device and --dtype"
        )
    for kind in (LINEAR_ATTENTION, FULL_ATTENTION):
        if kind not in model.layer_types:
            raise MemoryPlanError(
                f"the model has no {kind} layer among its {model.num_hidden_layers}: the plan is for "
                "hybrid models, which have both kinds; check layer_types in config.json"
            )
    if args.pp_size > model.num_hidden_layers:
        raise MemoryPlanError(
            f"--pp-size {args.pp_size} leaves stages without a layer, the model has "
            f"{model.num_hidden_layers}: lower it"
        )
    share = args.mamba_full_memory_ratio
    if share is not None and not LEAST_MAMBA_SHARE <= share <= MOST_MAMBA_SHARE:
        raise MemoryPlanError(
            f"--mamba-full-memory-ratio {share:g} must lie in {LEAST_MAMBA_SHARE:g} .. "
            f"{MOST_MAMBA_SHARE:g}: it is the state pool's bytes per byte of KV"
        )
    if args.enable_linear_lossless_verify and args.linear_lossless_commit == "deferred":
        if draft_tokens is not None and 2 * draft_tokens > MAX_RING_CELLS:
            raise MemoryPlanError(
                f"--linear-lossless-commit deferred needs a ring of {2 * draft_tokens} cells for "
                f"{draft_tokens} draft tokens, and a ring has at most {MAX_RING_CELLS}: lower "
                f"--speculative-num-draft-tokens to at most {MAX_RING_CELLS // 2}, or use "
                "--linear-lossless-commit immediate"
            )
