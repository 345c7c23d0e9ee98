"""Planned bytes against torch's own counters on a GPU.

torch rounds every allocation up to 512 bytes, and takes memory from the driver in segments: 2 MiB for
allocations up to 1 MiB, 20 MiB for those up to 10 MiB, and multiples of 2 MiB above. So allocated
bytes are exact up to 511 bytes a tensor, and reserved bytes up to the segments' slack.
"""

from __future__ import annotations

import gc

import pytest
import torch

from sglang.srt.mem_cache.memory_plan import build_pools, check_allocated
from sglang.srt.mem_cache.plan_types import MemoryPlan
from sglang.test.ci.ci_register import register_cuda_ci
from sglang.test.plan_cases import draft, model, plan

register_cuda_ci(est_time=20, stage="base-b", runner_config="1-gpu-large")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

ROUND = 512
MIB = 1 << 20
LIMITS = {"max_total_tokens": 20_000, "max_mamba_cache_size": 20, "max_running_requests": 4}


def rounded(made: MemoryPlan) -> int:
    """What torch says is allocated for the plan's tensors."""
    return sum(-(-spec.nbytes // ROUND) * ROUND for spec in made.tensors)


def segment(nbytes: int) -> int:
    """Memory that one tensor may make torch take from the driver."""
    if nbytes <= MIB:
        return 2 * MIB
    if nbytes < 10 * MIB:
        return 20 * MIB
    return -(-nbytes // (2 * MIB)) * 2 * MIB


CASES = {
    "35b-default": ("Qwen3.6-35B-A3B-FP8", {}),
    "35b-lossless": ("Qwen3.6-35B-A3B-FP8", {"enable_linear_lossless_verify": True}),
    "35b-fp8-kv": ("Qwen3.6-35B-A3B-FP8", {"kv_cache_dtype": "fp8_e4m3"}),
    "35b-bf16-state": (
        "Qwen3.6-35B-A3B-FP8",
        {"enable_linear_lossless_verify": True, "mamba_ssm_dtype": "bfloat16"},
    ),
    "35b-deferred": (
        "Qwen3.6-35B-A3B-FP8",
        {"enable_linear_lossless_verify": True, "linear_lossless_commit": "deferred"},
    ),
    "27b-dflash2": (
        "Qwen3.8-27B-FP8",
        {
            "speculative_algorithm": "DFLASH",
            "speculative_num_draft_tokens": 8,
            "draft_config": "Qwen3.8-27B-DFlash2",
        },
    ),
    "0.8b-no-speculation": (
        "Qwen3.5-0.8B",
        {"speculative_algorithm": None, "speculative_num_draft_tokens": None},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_counters_agree_with_the_plan(case):
    """Catches a tensor that is allocated twice, or one that no plan knows of."""
    name, changes = CASES[case]
    flags = {**LIMITS, **changes}
    if "draft_config" in flags:
        flags["draft_config"] = draft(flags["draft_config"])
    made = plan(model(name), 80, **flags)
    gc.collect()
    torch.cuda.empty_cache()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    pools = build_pools(made, "cuda")
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated() - allocated
    reserved = torch.cuda.memory_reserved() - reserved
    print(
        f"{case}: planned {made.pool_bytes}, allocated {allocated} "
        f"(+{allocated - made.pool_bytes}), reserved {reserved} (+{reserved - made.pool_bytes})"
    )
    check_allocated(made, pools)
    assert allocated == rounded(made)
    assert allocated <= reserved <= sum(segment(spec.nbytes) for spec in made.tensors)
    assert reserved <= 1.01 * made.pool_bytes + 64 * MIB
    pools.check_integrity()
    assert not pools.kv_pool.get_key_buffer(0).float().any()
    del pools
    gc.collect()
    assert torch.cuda.memory_allocated() <= ROUND, "pools give everything back"


def test_pool_operations_on_the_device():
    """Slots are copied, cleared, offloaded and restored on the GPU as on the host."""
    made = plan(model("Qwen3.5-0.8B"), 80, enable_linear_lossless_verify=True, **LIMITS)
    pools = build_pools(made, "cuda")
    state = pools.req_pool.mamba_pool
    state.mamba_cache.temporal.normal_()
    state.mamba_cache.conv[0].normal_()
    slots = torch.tensor([1, 3], device="cuda")
    before = state.mamba_cache.temporal.clone()
    saved = state.get_cpu_copy(slots)
    state.copy_from(slots, slots + 1)
    assert torch.equal(state.mamba_cache.temporal[:, slots + 1], before[:, slots])
    state.clear_slots(slots)
    assert not state.mamba_cache.temporal[:, slots].any()
    state.load_cpu_copy(saved, slots)
    assert torch.equal(state.mamba_cache.temporal[:, slots], before[:, slots])
    pointers = state.get_contiguous_buf_infos()[0]
    assert len(pointers) == 2 * len(state.mamba_layer_ids)
    loc = torch.tensor([70, -1, 64], device="cuda")
    k = torch.randn(3, made.settings.kv.num_heads, made.settings.kv.head_dim, device="cuda")
    pools.kv_pool.set_kv_buffer(2, loc, k, -k)
    assert torch.equal(pools.kv_pool.get_value_buffer(2)[loc[[0, 2]]], -k[[0, 2]].bfloat16())


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
