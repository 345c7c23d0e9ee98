"""What a plan sets aside beside its pools, against what the GPU's attention allocates."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang.kernels.ops.quantization.launch import SMALL_ROWS, HopperTile
from sglang.kernels.ops.quantization.rows import QuantizedRows
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.mem_cache.plan_reserves import FEW_ROWS, SLOT_TILE_ROWS, expert_slot_bytes
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.plan_cases import model, plan

register_cpu_ci(est_time=3, suite="unit")

CONFIG = model("Qwen3.6-35B-A3B-FP8")
FLAGS = {"max_mamba_cache_size": 640}


def split_line(made):
    """The plan's bytes for split contexts; None without such a line."""
    lines = {line.name: line.nbytes for line in made.reserves}
    return lines.get("split contexts")


def allocated(max_step_rows):
    """Bytes of the workspace that the backend makes at its start, on a device without storage."""
    requests = SimpleNamespace(device="meta", max_context_len=CONFIG.max_position_embeddings)
    backend = TritonAttnBackend(
        requests,
        None,
        max_step_rows=max_step_rows,
        num_heads=CONFIG.num_attention_heads,
        head_dim=CONFIG.head_dim,
    )
    (space,) = backend._workspaces
    assert space.partial.dtype is torch.bfloat16
    return space.partial.nbytes + space.lse.nbytes


@pytest.mark.parametrize("running", [25, 128])
def test_split_contexts_are_paid_for_target_and_drafter(running):
    """Catches a workspace that grew, in rows, splits or dtype, without its line of the plan.

    25 x 4 rows are fewer than those of short prompt chunks, 128 x 4 are more.
    """
    made = plan(CONFIG, 200, max_running_requests=running, **FLAGS)
    rows = made.max_running_requests * made.draft_tokens
    assert rows == running * 4
    assert split_line(made) == 2 * allocated(rows)
    assert allocated(512) != allocated(513)  # the control


def test_a_drafter_without_attention_pays_once():
    """Catches a workspace that is charged for a drafter which has no layers."""
    flags = {"max_running_requests": 128, **FLAGS}
    made = plan(CONFIG, 200, speculative_algorithm="NGRAM", **flags)
    assert split_line(made) == allocated(128 * made.draft_tokens)


def test_the_cpu_keeps_no_partial_results():
    made = plan(CONFIG, device="cpu", speculative_algorithm=None, max_running_requests=4)
    assert split_line(made) is None


def activations(chunk, name="Qwen3.6-35B-A3B-FP8", **flags):
    made = plan(model(name), 200, chunked_prefill_size=chunk, **{**FLAGS, **flags})
    return {line.name: line.nbytes for line in made.reserves}["activations"]


def made_by_slot(rows):
    """Bytes that experts of a prompt allocate, from the tensors that they make, on a device without storage."""
    hidden, inner = CONFIG.hidden_size, CONFIG.moe_intermediate_size
    chosen = torch.empty(rows, CONFIG.num_experts_per_tok, dtype=torch.int32, device="meta")
    tiles = chosen.numel() // HopperTile().block_m + min(chosen.numel(), CONFIG.num_experts)
    meta = {"dtype": torch.bfloat16, "device": torch.device("meta")}
    slots = tiles * HopperTile().block_m
    shared = -(-rows // HopperTile().block_m) * HopperTile().block_m
    by_slot = QuantizedRows.empty(slots + shared, inner, **meta)
    results = torch.empty(chosen.numel() + rows, hidden, **meta)
    made = (by_slot.values, by_slot.scale, results)
    return slots * hidden + sum(each.nbytes for each in made)


@pytest.mark.parametrize("rows", [129, 512, 8192])
def test_rows_of_experts_by_slot_are_in_the_estimate(rows):
    """Catches a temporary of a prompt's experts that the plan does not know; small chunks are mostly padding."""
    assert SLOT_TILE_ROWS == HopperTile().block_m and FEW_ROWS == SMALL_ROWS
    assert expert_slot_bytes(CONFIG, rows, "bfloat16", 1) == made_by_slot(rows)
    assert activations(rows) > made_by_slot(rows)


def test_by_slot_costs_nothing_where_other_layers_are_wider():
    """Catches a plan of the published chunk that shrank, and bf16 experts or a CPU that pay for FP8 ones."""
    bf16 = "Qwen3.6-35B-A3B"
    assert activations(8192) == activations(8192, bf16)
    assert activations(512) > activations(512, bf16)
    small = {"max_running_requests": 4, "speculative_algorithm": None, "device": "cpu"}
    assert activations(512, **small) == activations(512, bf16, **small)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
