"""The feature's published figures, computed from published geometry alone."""

from __future__ import annotations

import pytest

from sglang.srt.mem_cache.state_layout import SNAPSHOTS, UPDATE_TUPLES
from sglang.srt.mem_cache.weight_sizes import (
    block_draft_weights,
    block_weights,
    mtp_weights,
    target_weights,
    weight_size,
)
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.plan_cases import GIB, draft, model, plan

register_cpu_ci(est_time=2, suite="unit")

MTP35 = {"config": "Qwen3.6-35B-A3B"}
DFLASH35 = {"config": "Qwen3.6-35B-A3B", "algorithm": "DFLASH", "draft": "Qwen3.6-35B-A3B-DFlash"}
DFLASH2_27 = {"config": "Qwen3.8-27B", "algorithm": "DFLASH", "draft": "Qwen3.8-27B-DFlash2"}
DSPARK_27 = {"config": "Qwen3.8-27B", "algorithm": "DSPARK", "draft": "Qwen3.8-27B-DSpark"}


def setup_plan(setup, *, draft_tokens, requests, lossless):
    """A plan large enough that nothing but the requested numbers limits it."""
    algorithm = setup.get("algorithm", "NEXTN")
    return plan(
        model(setup["config"]),
        memory_gib=400,
        speculative_algorithm=algorithm,
        speculative_num_steps=draft_tokens - 1 if algorithm == "NEXTN" else 1,
        speculative_num_draft_tokens=draft_tokens,
        max_running_requests=requests,
        max_mamba_cache_size=6 * requests,
        enable_linear_lossless_verify=lossless,
        mem_fraction_static=0.9,
        draft_config=draft(setup["draft"]) if "draft" in setup else None,
    )


@pytest.mark.parametrize(
    ("setup", "draft_tokens", "requests", "snapshots", "tuples"),
    [
        pytest.param(MTP35, 4, 25, "6.09", "0.10", id="35b-mtp-25"),
        pytest.param(MTP35, 4, 8, "2.11", "0.03", id="35b-mtp-8"),
        pytest.param(DFLASH35, 16, 8, "8.44", "0.13", id="35b-dflash-8"),
        pytest.param(DFLASH2_27, 8, 8, "10.12", "0.16", id="27b-dflash2-8"),
        pytest.param(DSPARK_27, 8, 8, "10.12", "0.16", id="27b-dspark-8"),
    ],
)
def test_verify_scratch(setup, draft_tokens, requests, snapshots, tuples):
    """Catches a row forgotten (requests + 1) and conv windows counted as recurrent-state scratch."""
    for lossless, published in ((False, snapshots), (True, tuples)):
        made = setup_plan(setup, draft_tokens=draft_tokens, requests=requests, lossless=lossless)
        assert made.verify_rows == requests + 1
        assert f"{made.verify_ssm_scratch_bytes / GIB:.2f}" == published


def test_floats_per_step_and_head():
    """A snapshot keeps K*V floats of a step, tuples keep V + K + 1."""
    made = plan(model("Qwen3.6-35B-A3B"))
    layout = made.settings.layout
    ratio = layout.scratch_row_bytes(kind=SNAPSHOTS, draft_tokens=1)
    conv = sum(t.nbytes for t in layout.conv_window_tensors(rows=1, draft_tokens=1))
    ratio = (ratio - conv) / (layout.scratch_row_bytes(kind=UPDATE_TUPLES, draft_tokens=1) - conv)
    assert f"{ratio:.1f}" == "63.8"


def test_ring_with_conv_windows():
    """26 rows of the 35B model: tuples alone 0.096 GiB, with shared conv windows 0.167 GiB."""
    made = setup_plan(MTP35, draft_tokens=4, requests=25, lossless=True)
    assert made.verify_ssm_scratch_bytes / GIB == pytest.approx(0.096, abs=5e-4)
    assert made.verify_scratch_bytes / GIB == pytest.approx(0.167, abs=5e-4)
    default = setup_plan(MTP35, draft_tokens=4, requests=25, lossless=False)
    assert default.verify_scratch_charged_bytes / GIB > 6.09


@pytest.mark.parametrize(
    ("setup", "draft_tokens", "requests", "published", "stock", "percent"),
    [
        pytest.param(MTP35, 4, 25, 289_344, 498_880, 58, id="35b-mtp-25"),
        pytest.param(MTP35, 4, 8, 100_096, 1_007_680, 10, id="35b-mtp-8"),
        pytest.param(DFLASH35, 16, 8, 200_832, 390_208, 51, id="35b-dflash-8"),
        pytest.param(DFLASH2_27, 8, 8, 125_824, 176_640, 71, id="27b-dflash2-8"),
        pytest.param(DSPARK_27, 8, 8, 125_888, 178_944, 70, id="27b-dspark-8"),
    ],
)
def test_tokens_that_freed_bytes_buy(setup, draft_tokens, requests, published, stock, percent):
    """Catches draft KV left out of a token's price, and a wrong price of default scratch."""
    plans = [
        setup_plan(setup, draft_tokens=draft_tokens, requests=requests, lossless=lossless)
        for lossless in (False, True)
    ]
    gain = plans[1].max_total_num_tokens - plans[0].max_total_num_tokens
    assert gain == pytest.approx(published, rel=0.01)
    assert round(100 * gain / stock) == percent
    per_token = plans[1].kv_bytes_per_token + plans[1].draft_kv_bytes_per_token
    assert plans[1].lossless_bytes_freed // per_token == pytest.approx(gain, abs=64)
    assert plans[0].lossless_bytes_freed == 0


@pytest.mark.parametrize(
    ("setup", "draft_tokens", "target", "drafted"),
    [
        pytest.param(MTP35, 4, 20_480, 2_048, id="mtp"),
        pytest.param(DFLASH35, 16, 20_480, 24_576, id="dflash"),
        pytest.param(DFLASH2_27, 8, 65_536, 20_480, id="dflash2"),
        pytest.param(DSPARK_27, 8, 65_536, 20_480, id="dspark"),
    ],
)
def test_kv_bytes_per_token(setup, draft_tokens, target, drafted):
    made = setup_plan(setup, draft_tokens=draft_tokens, requests=8, lossless=True)
    assert (made.kv_bytes_per_token, made.draft_kv_bytes_per_token) == (target, drafted)


def test_published_setup_on_an_80_gb_card():
    """The published command's flags give a plan with 25 running requests in both arms."""
    flags = {
        "mem_fraction_static": 0.8,
        "max_running_requests": 25,
        "max_mamba_cache_size": 150,
    }
    default = plan(model("Qwen3.6-35B-A3B-FP8"), **flags)
    lossless = plan(model("Qwen3.6-35B-A3B-FP8"), enable_linear_lossless_verify=True, **flags)
    assert default.max_running_requests == lossless.max_running_requests == 25
    assert lossless.max_total_num_tokens - default.max_total_num_tokens == 289_280


@pytest.mark.parametrize(
    ("name", "blocks", "mtp"),
    [
        ("Qwen3.6-35B-A3B", 33_643_489_920, 844_640_768),
        ("Qwen3.6-35B-A3B-FP8", 33_643_489_920, 844_640_768),
    ],
)
def test_block_parameters(name, blocks, mtp):
    config = model(name)
    layers = (w for i in range(config.num_hidden_layers) for w in block_weights(config, i))
    assert weight_size(layers, dtype="bfloat16").num_params == blocks
    assert weight_size(mtp_weights(config), dtype="bfloat16").num_params == mtp


@pytest.mark.parametrize(
    ("name", "text", "mtp"),
    [
        ("Qwen3.8-27B", 26_895_998_464, 424_699_392),
        ("Qwen3.8-27B-FP8", 26_895_998_464, 424_699_392),
        ("Qwen3.5-0.8B", 752_393_024, 20_452_864),
        ("Qwen3-Next-80B-A3B", 79_674_391_296, 1_650_471_424),
    ],
)
def test_text_parameters(name, text, mtp):
    config = model(name)
    assert weight_size(target_weights(config), dtype="bfloat16").num_params == text
    assert weight_size(mtp_weights(config), dtype="bfloat16").num_params == mtp


@pytest.mark.parametrize(
    ("name", "target", "params"),
    [
        ("Qwen3.6-35B-A3B-DFlash", "Qwen3.6-35B-A3B", 385_906_176),
        ("Qwen3.8-27B-DFlash2", "Qwen3.8-27B", 3_848_808_960 // 2),
        ("Qwen3.8-27B-DSpark", "Qwen3.8-27B", 1_857_358_337),
        ("Qwen3.8-27B-DSpark-v1", "Qwen3.8-27B", 1_359_284_737),
    ],
)
def test_drafter_parameters(name, target, params):
    config = model(target)
    weights = block_draft_weights(
        draft(name),
        target_hidden_size=config.hidden_size,
        num_target_layers=config.num_hidden_layers,
    )
    assert weight_size(weights, dtype="bfloat16").num_params == params


def test_fp8_weights_take_one_byte_and_a_scale_a_block():
    """Catches scales forgotten and modules of the ignore list counted as quantized."""
    config = model("Qwen3.6-35B-A3B-FP8")
    layers = list(block_weights(config, 0))
    size = weight_size(iter(layers), dtype="bfloat16", config=config)
    kept = ("gate", "shared_expert_gate", "in_proj_a", "in_proj_b")
    linear = [w for w in layers if w.linear and w.name.rsplit(".", 1)[1] not in kept]
    quantized = sum(w.num_params for w in linear)
    scales = sum(-(-w.shape[0] // 128) * -(-w.shape[1] // 128) * w.copies for w in linear)
    assert size.nbytes == 2 * (size.num_params - quantized) + quantized + 2 * scales


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_shards_add_up(tp_size):
    """Every rank's linear weights times the ranks give the whole model, replicated parts aside."""
    config = model("Qwen3.6-35B-A3B")
    one = sum(
        w.num_params for w in target_weights(config) if w.linear and "gate" not in w.name[-18:]
    )
    shard = sum(
        w.num_params
        for w in target_weights(config, tp_size=tp_size)
        if w.linear and "gate" not in w.name[-18:]
    )
    replicated_kv = 0
    if tp_size > config.num_key_value_heads:
        copies = tp_size // config.num_key_value_heads - 1
        rows = 2 * config.num_key_value_heads * config.head_dim * config.hidden_size
        replicated_kv = copies * rows * len(config.full_attention_layer_ids)
    assert shard * tp_size == one + replicated_kv


@pytest.mark.parametrize("pp_size", [2, 3])
def test_stages_add_up(pp_size):
    config = model("Qwen3.8-27B")
    whole = weight_size(target_weights(config), dtype="bfloat16").num_params
    stages = [
        weight_size(
            target_weights(config, pp_size=pp_size, pp_rank=rank), dtype="bfloat16"
        ).num_params
        for rank in range(pp_size)
    ]
    assert sum(stages) == whole


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
