"""Thousands of random models and flags: what is planned is what is allocated, and more is never less."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from sglang.srt.mem_cache.memory_plan import build_pools, check_allocated
from sglang.srt.mem_cache.plan_inputs import MemoryPlanError
from sglang.srt.mem_cache.planner import make_plan
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.plan_cases import GIB, draft, model, plan, server_args, tiny_config

register_cpu_ci(est_time=25, suite="unit")

MIB = 1 << 20
NUM_CASES = 2000


def random_model(rng):
    keys = rng.choice([2, 4, 16])
    interval = rng.choice([2, 4])
    layers = interval * rng.randrange(1, 13)
    moe = rng.random() < 0.3
    return tiny_config(
        architectures=["Qwen3_5MoeForCausalLM" if moe else "Qwen3_5ForCausalLM"],
        hidden_size=64 * rng.randrange(1, 17),
        num_hidden_layers=layers,
        full_attention_interval=interval,
        num_attention_heads=16,
        num_key_value_heads=rng.choice([2, 4, 8]),
        head_dim=rng.choice([64, 128, 256]),
        linear_num_key_heads=keys,
        linear_num_value_heads=keys * rng.choice([1, 2, 3]),
        linear_key_head_dim=rng.choice([32, 64, 128]),
        linear_value_head_dim=rng.choice([32, 64, 128]),
        linear_conv_kernel_dim=rng.choice([2, 4]),
        mamba_ssm_dtype=rng.choice(["float32", "bfloat16"]),
        num_experts=8 if moe else 0,
        num_experts_per_tok=2 if moe else 0,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        vocab_size=rng.choice([512, 32000]),
    )


def random_flags(rng):
    algorithm = rng.choice([None, "NEXTN", "NEXTN", "NGRAM", "DFLASH", "DSPARK"])
    width = rng.choice([2, 3, 4, 8, 16])
    page = rng.choice([1, 16, 64])
    strategy = rng.choice(["extra_buffer", "extra_buffer", "extra_buffer_lazy", "no_buffer"])
    topk = rng.choice([2, 10]) if algorithm == "NGRAM" else 1
    flags = {
        "speculative_algorithm": algorithm,
        "speculative_num_steps": width - 1,
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": width,
        "speculative_adaptive": algorithm == "NEXTN" and rng.random() < 0.3,
        "page_size": 1 if strategy == "no_buffer" else page,
        "mamba_radix_cache_strategy": strategy,
        "disable_overlap_schedule": strategy == "no_buffer" or rng.random() < 0.3,
        "disable_radix_cache": rng.random() < 0.2,
        "max_running_requests": rng.choice([None, 1, 8, 25, 64]),
        "max_mamba_cache_size": rng.choice([None, None, 30, 150]),
        "mamba_full_memory_ratio": rng.choice([0.2, 0.9, 1.5]),
        "mamba_ssm_dtype": rng.choice([None, "float32", "bfloat16"]),
        "kv_cache_dtype": rng.choice(["bfloat16", "fp8_e4m3", "float32"]),
        "context_length": rng.choice([512, 2048]),
        "chunked_prefill_size": 512,
        "mem_fraction_static": rng.choice([None, None, 0.6]),
        "max_total_tokens": rng.choice([None, None, None, 20_000]),
        "device": rng.choice(["cuda", "cuda", "cpu"]),
        "tp_size": rng.choice([1, 1, 2]),
        "pp_size": rng.choice([1, 1, 2]),
        "disaggregation_mode": rng.choice(["null", "null", "null", "prefill"]),
    }
    if flags["device"] == "cpu":
        flags |= {"dtype": "float32", "disable_cuda_graph": True, "kv_cache_dtype": "float32"}
    return flags


DRAFTS = {"DFLASH": draft("Qwen3.8-27B-DFlash2"), "DSPARK": draft("Qwen3.8-27B-DSpark-v1")}


def small_draft(algorithm, config):
    """A block drafter of a random model, at a size that it can carry."""
    if algorithm not in DRAFTS:
        return None
    return replace(
        DRAFTS[algorithm],
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_target_layers=config.num_hidden_layers,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_hidden_layers=2,
        layer_types=("full_attention",) * 2,
        target_layer_ids=(0,),
    )


def try_plan(config, flags, memory, lossless=False, pp_rank=0):
    try:
        return make_plan(
            config,
            server_args(**flags, enable_linear_lossless_verify=lossless),
            device_memory_bytes=memory,
            draft_config=small_draft(flags["speculative_algorithm"], config),
            pp_rank=pp_rank,
        )
    except MemoryPlanError as error:
        assert "--" in str(error)
        return None


def check_sizes(made):
    sizes = (
        made.max_total_num_tokens,
        made.max_mamba_cache_size,
        made.max_running_requests,
        made.largest_request_tokens,
        made.weight_bytes,
        made.static_bytes,
        made.unspent_bytes,
    )
    assert min(sizes) >= 0 and made.max_running_requests >= 1
    assert made.max_total_num_tokens % made.page_size == 0
    assert made.largest_request_tokens <= made.max_total_num_tokens
    assert made.verify_scratch_charged_bytes >= made.verify_scratch_bytes or not made.verify_rows
    reserved = sum(line.nbytes for line in made.reserves)
    assert made.static_bytes + reserved <= made.device_memory_bytes
    held = made.max_running_requests * made.slots_per_request
    assert held <= made.max_mamba_cache_size


def test_random_configurations():
    rng = random.Random(20)
    planned = refused = lossless_planned = lossless_gained = 0
    for case in range(NUM_CASES):
        config, flags = random_model(rng), random_flags(rng)
        memory = int(rng.choice([1800, 3000, 6000, 9000]) * MIB * rng.uniform(0.9, 1.1))
        pp_rank = rng.randrange(flags["pp_size"])
        default = try_plan(config, flags, memory, pp_rank=pp_rank)
        if default is None:
            refused += 1
            continue
        planned += 1
        check_sizes(default)
        plans = [default]
        chain = flags["speculative_algorithm"] not in (None, "NGRAM")
        if chain:
            lossless = try_plan(config, flags, memory, lossless=True, pp_rank=pp_rank)
            assert lossless is not None, "what fits by default fits with the flag on"
            check_sizes(lossless)
            assert lossless.max_total_num_tokens >= default.max_total_num_tokens
            assert lossless.max_running_requests >= default.max_running_requests
            assert lossless.max_mamba_cache_size >= default.max_mamba_cache_size
            plans.append(lossless)
            lossless_planned += 1
            lossless_gained += lossless.max_total_num_tokens > default.max_total_num_tokens
        for made in plans:
            larger = try_plan(
                config,
                flags,
                memory + rng.choice([1, 4096, MIB, 100 * MIB, 3 * GIB]),
                lossless=made.lossless_verify,
                pp_rank=pp_rank,
            )
            assert larger is not None
            assert larger.max_total_num_tokens >= made.max_total_num_tokens
            assert larger.max_mamba_cache_size >= made.max_mamba_cache_size
        made = plans[case % len(plans)]
        pools = build_pools(made, "meta")
        check_allocated(made, pools)
    counts = (planned, refused, lossless_planned, lossless_gained)
    assert planned > 1200 and refused > 50 and lossless_planned > 700, counts
    assert lossless_gained > 200, counts


@pytest.mark.parametrize("name", ["Qwen3.6-35B-A3B", "Qwen3.6-35B-A3B-FP8", "Qwen3.8-27B-FP8"])
@pytest.mark.parametrize("lossless", [False, True])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_published_models_allocate_what_is_planned(name, lossless, tp_size):
    made = plan(model(name), 100, enable_linear_lossless_verify=lossless, tp_size=tp_size)
    check_sizes(made)
    pools = build_pools(made, "meta")
    check_allocated(made, pools)
    storages = {t.untyped_storage().nbytes() for t in pools.kv_pool.named_tensors().values()}
    assert len(storages) == 1


def test_a_difference_is_an_error_that_names_the_tensor():
    """Control: planned and allocated must really be compared."""
    config = tiny_config()
    made = plan(config, 4, context_length=512, max_running_requests=2)
    pools = build_pools(made, "meta")
    check_allocated(made, pools)
    pools.req_pool.mamba_pool._tensors["temporal"] = torch.empty(3, device="meta")
    with pytest.raises(MemoryPlanError, match=r"state\.temporal: planned \d+ bytes, allocated 12"):
        check_allocated(made, pools)
    other = build_pools(replace(made, lossless_verify=True), "meta")
    with pytest.raises(MemoryPlanError, match="state.intermediate_ssm_u: planned None"):
        check_allocated(made, other)


def test_small_pools_on_the_host_hold_zeros():
    made = plan(tiny_config(), 4, context_length=512, max_running_requests=2, max_total_tokens=640)
    pools = build_pools(made, "cpu")
    check_allocated(made, pools)
    for tensor in pools.req_pool.named_tensors().values():
        assert not tensor.any()
    assert pools.token_allocator.available_size() == made.max_total_num_tokens == 640
    assert pools.draft_kv_pool.k_buffer[0].shape[0] == 704


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
