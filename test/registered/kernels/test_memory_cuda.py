"""Planned bytes against torch's own counters on a GPU.

torch counts three things. *Requested* bytes are the tensors' own and must equal the plan. *Allocated* bytes
are whole blocks: multiples of 512, and for tensors above 1 MiB up to 1 MiB more, because a smaller rest
of a segment is not split off. *Reserved* bytes are segments taken from the driver: 2 MiB for tensors up
to 1 MiB, 20 MiB for those below 10 MiB, multiples of 2 MiB above.
"""

from __future__ import annotations

import gc

import pytest
import torch

from sglang.srt.mem_cache.memory_plan import build_pools, check_allocated
from sglang.srt.mem_cache.plan_types import MemoryPlan
from sglang.test.ci.ci_register import register_amd_ci, register_cuda_ci
from sglang.test.plan_cases import draft, model, plan

register_cuda_ci(est_time=20, stage="base-b", runner_config="1-gpu-large")
register_amd_ci(est_time=20, suite="stage-b-test-1-gpu-large-amd")
register_amd_ci(est_time=20, suite="stage-b-test-1-gpu-small-amd-mi35x")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

ROUND = 512
MIB = 1 << 20
LIMITS = {"max_total_tokens": 20_000, "max_mamba_cache_size": 20, "max_running_requests": 4}


def block_limits(made: MemoryPlan) -> tuple[int, int]:
    """Fewest and most bytes of the blocks that hold the plan's tensors."""
    fewest = sum(-(-spec.nbytes // ROUND) * ROUND for spec in made.tensors)
    return fewest, fewest + MIB * sum(spec.nbytes > MIB for spec in made.tensors)


def counters() -> dict[str, int]:
    """Bytes requested, allocated and reserved at the moment."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    stats = torch.cuda.memory_stats()
    return {
        "requested": stats.get("requested_bytes.all.current", 0),
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
    }


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
    before = counters()
    pools = build_pools(made, "cuda")
    used = {name: value - before[name] for name, value in counters().items()}
    print(f"{case}: planned {made.pool_bytes}, {used}")
    check_allocated(made, pools)
    assert used["requested"] == made.pool_bytes
    fewest, most = block_limits(made)
    assert fewest <= used["allocated"] <= most
    assert used["allocated"] <= used["reserved"]
    assert used["reserved"] <= sum(segment(spec.nbytes) for spec in made.tensors)
    assert used["reserved"] <= 1.01 * made.pool_bytes + 64 * MIB
    pools.check_integrity()
    assert not pools.kv_pool.get_key_buffer(0).float().any()
    del pools
    assert counters()["requested"] == before["requested"], "pools give everything back"


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
