"""What a plan sets aside beside its pools, against what the GPU's attention allocates."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
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


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
