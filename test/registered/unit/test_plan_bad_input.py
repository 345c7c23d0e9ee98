"""Bad input of ``sglang plan``: one line that names the flag, its value, and the way out.

Catches: a traceback instead of a sentence, a flag that is read and ignored, a plan for a model, a
drafter or a layout that no server could run, a hint at a flag that plays no part.
"""

import json

import pytest

from sglang.kernels.ops.gdn_cuda.deferred import MAX_CELLS
from sglang.srt.mem_cache.plan_cli import BAD_ARGUMENTS, NO_PLAN, main
from sglang.srt.mem_cache.plan_inputs import MemoryPlanError
from sglang.srt.mem_cache.plan_plot import _with_running, sweep
from sglang.srt.mem_cache.pool import MambaPool
from sglang.srt.mem_cache.state_layout import MAX_RING_CELLS
from sglang.srt.mem_cache.weight_sizes import kv_heads_per_rank
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.plan_cases import CONFIGS, GIB, draft, model, plan, server_args, tiny_config

register_cpu_ci(est_time=6, suite="unit")

MODEL = CONFIGS / "Qwen3.6-35B-A3B-FP8.json"
DEVICE = ["--device-memory-gb", "80"]


def run(words, capsys):
    code = main([str(word) for word in words])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not JSON"),
        ("model: yes", "is not JSON"),
        ('{"architectures": ["Qwen3_5', "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        ("[1, 2]", "holds no JSON object"),
        ("null", "holds no JSON object"),
        ("{}", "is not supported; supported are"),
    ],
)
def test_a_file_that_is_no_config_is_named(tmp_path, capsys, content, message):
    file = tmp_path / "config.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    code, _, err = run(["--model-path", file, *DEVICE], capsys)
    assert code == BAD_ARGUMENTS and message in err
    if "JSON" in message:
        assert str(file) in err


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_key_value_heads", 0),
        ("num_attention_heads", -4),
        ("linear_num_key_heads", 0),
        ("linear_key_head_dim", -128),
        ("linear_conv_kernel_dim", 0),
        ("num_hidden_layers", "forty"),
        ("hidden_size", 0),
        ("vocab_size", 1.5),
        ("max_position_embeddings", -1),
        ("mtp_num_hidden_layers", -1),
        ("mlp_only_layers", 5),
        ("mlp_only_layers", ["a"]),
        ("layer_types", 5),
        ("quantization_config", "fp8"),
        ("rope_parameters", "yarn"),
        ("num_experts", [1]),
        ("eos_token_id", {}),
        ("eos_token_id", [[1]]),
        ("rms_norm_eps", "small"),
        ("output_gate_type", [1]),
        ("architectures", 5),
        ("text_config", [1]),
    ],
)
def test_a_size_that_cannot_be_is_named(tmp_path, capsys, key, value):
    """Catches divisions by zero and plans with negative or empty tensors."""
    raw = json.loads(MODEL.read_text())
    at_root = key in ("text_config", "architectures")
    (raw if at_root else raw["text_config"])[key] = value
    file = tmp_path / "config.json"
    file.write_text(json.dumps(raw))
    code, _, err = run(["--model-path", file, *DEVICE], capsys)
    assert code == BAD_ARGUMENTS and f"{key}={value!r}" in err


@pytest.mark.parametrize("kind", ["linear_attention", "full_attention"])
def test_a_model_of_one_kind_of_layer_is_refused(kind):
    with pytest.raises(MemoryPlanError, match="hybrid models"):
        plan(tiny_config(layer_types=[kind] * 4), 8)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device-memory-gb", "1e300"], "--device-memory-gb 1e+300"),
        (["--device-memory-gb", "1e-12"], "--device-memory-gb 1e-12"),
        ([*DEVICE, "--config", "/nowhere.yaml"], "--config /nowhere.yaml"),
        (
            [*DEVICE, "--hicache-ratio", "5"],
            "--hicache-ratio 5.0 needs --enable-hierarchical-cache",
        ),
    ],
)
def test_wrong_values(capsys, words, message):
    code, _, err = run(["--model-path", MODEL, *words], capsys)
    assert code == BAD_ARGUMENTS and message in err


def test_the_file_of_arguments_is_read(tmp_path, capsys):
    """Catches a --config that is accepted and ignored."""
    file = tmp_path / "args.yaml"
    file.write_text(f"model-path: {MODEL}\nspeculative-algorithm: NEXTN\npage-size: 32\n")
    code, out, _ = run(["--config", file, *DEVICE, "--json"], capsys)
    made = json.loads(out)["plans"]["lossless"]
    assert code == 0 and made["page_size"] == 32 and made["draft_tokens"] == 4


@pytest.mark.parametrize("share", [1e-300, 1e-9, 1e9, 1e308])
def test_a_share_beyond_reason_is_refused(share):
    """Catches NaN slots and an endless search for the last budget of a slot count."""
    with pytest.raises(MemoryPlanError, match=r"--mamba-full-memory-ratio .* must lie in"):
        plan(tiny_config(), 8, mamba_full_memory_ratio=share)


@pytest.mark.parametrize("share", [1e-6, 1e6])
def test_the_ends_of_the_range_work_or_say_why(share):
    try:
        assert plan(tiny_config(), 60, mamba_full_memory_ratio=share).max_total_num_tokens > 0
    except MemoryPlanError as error:
        assert "--mamba-full-memory-ratio" in str(error)


def test_a_stage_without_layers_is_refused():
    flags = {"speculative_algorithm": None}
    assert plan(tiny_config(), 8, pp_size=4, **flags).max_total_num_tokens
    with pytest.raises(MemoryPlanError, match="--pp-size 5 leaves stages without a layer"):
        plan(tiny_config(), 8, pp_size=5, **flags)


def test_ranks_never_share_a_part_of_a_kv_head():
    assert [kv_heads_per_rank(4, tp) for tp in (1, 2, 4, 8, 12)] == [4, 2, 1, 1, 1]
    for tp in (3, 6):
        with pytest.raises(ValueError, match=f"--tp-size {tp} .* 4 KV heads"):
            kv_heads_per_rank(4, tp)


@pytest.mark.parametrize(
    ("target", "drafter", "algorithm", "message"),
    [
        ("Qwen3.8-27B", "Qwen3.6-35B-A3B-DFlash", "DFLASH", "its hidden_size is 2048"),
        ("Qwen3.6-35B-A3B", "Qwen3.6-35B-A3B-DFlash", "DSPARK", "is a drafter for DFLASH"),
        ("Qwen3.8-27B", "Qwen3.8-27B-DSpark", "DFLASH", "is a drafter for DSPARK"),
    ],
)
def test_a_drafter_of_another_target_is_refused(target, drafter, algorithm, message):
    with pytest.raises(MemoryPlanError, match=message):
        plan(model(target), speculative_algorithm=algorithm, draft_config=draft(drafter))


@pytest.mark.parametrize("key", ["num_attention_heads", "vocab_size"])
def test_a_drafter_without_sizes_is_named(tmp_path, capsys, key):
    raw = json.loads((CONFIGS / "Qwen3.6-35B-A3B-DFlash.json").read_text())
    del raw[key]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(raw))
    words = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", file]
    code, _, err = run(["--model-path", MODEL, *DEVICE, *words], capsys)
    assert code == BAD_ARGUMENTS and f"{key}=None" in err


def test_a_ring_longer_than_its_mask_is_refused():
    """A deferred commit keeps two of the widest verifies in a ring whose ends are bits of a mask."""
    assert MAX_RING_CELLS == MAX_CELLS
    flags = {"enable_linear_lossless_verify": True, "linear_lossless_commit": "deferred"}
    widest = {"speculative_num_steps": 31, "speculative_num_draft_tokens": 32}
    made = plan(tiny_config(), 8, **flags, **widest)
    assert made.settings.ring_cells == 64
    beyond = {"speculative_num_steps": 32, "speculative_num_draft_tokens": 33}
    with pytest.raises(MemoryPlanError, match=r"ring of 66 cells .*at most 64: lower --spec"):
        plan(tiny_config(), 8, **flags, **beyond)
    plan(tiny_config(), 8, enable_linear_lossless_verify=True, **beyond)


@pytest.mark.parametrize("cells", [65, 7])
def test_a_pool_refuses_such_a_ring_too(cells):
    from sglang.srt.configs.mamba_utils import mamba_cache_params

    params = mamba_cache_params(tiny_config())
    with pytest.raises(ValueError, match=rf"ring of {cells} cells .* 8 \.\. 64"):
        MambaPool(
            size=2,
            spec_state_size=1,
            cache_params=params,
            mamba_layer_ids=params.layers,
            device="meta",
            speculative_num_draft_tokens=4,
            speculative_eagle_topk=1,
            enable_linear_lossless_verify=True,
            lossless_ring_cells=cells,
        )


@pytest.mark.parametrize("name", ["folder", "plan", "plan.xyz", "none/plan.png"])
def test_a_picture_that_cannot_be_written_is_told_before_the_plan(tmp_path, capsys, name):
    """Catches a picture written under another name, and one refused after all the work."""
    (tmp_path / "folder").mkdir()
    words = ["--model-path", MODEL, *DEVICE, "--speculative-algorithm", "NEXTN"]
    code, out, err = run([*words, "--plot", tmp_path / name], capsys)
    assert code == BAD_ARGUMENTS and f"--plot {tmp_path / name}" in err and not out
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_the_picture_shows_only_what_the_server_accepts():
    """Catches a curve for lossless verify of trees, which does not exist."""
    args = server_args(speculative_eagle_topk=4, speculative_num_draft_tokens=8)
    points = sweep(model("Qwen3.6-35B-A3B-FP8"), args, 80 * GIB, (4, 8), _with_running)
    assert len(points["default"]) == 2 and points["lossless"] == []


@pytest.mark.parametrize(
    ("words", "has", "has_not"),
    [
        (
            ["--max-mamba-cache-size", "900"],
            ["or lower --max-mamba-cache-size 900", "GiB are available"],
            ["--speculative-num-draft-tokens", "verify rows"],
        ),
        (
            ["--device-memory-gb", "2"],
            [
                "--chunked-prefill-size 8192",
                "--max-running-requests 128",
                "the device has 2.00 GiB",
            ],
            ["--speculative"],
        ),
        (
            ["--max-running-requests", "999999999"],
            ["--max-running-requests 999999999", "the device has 80.00 GiB"],
            [],
        ),
        (
            ["--mem-fraction-static", "0.01"],
            [
                "raise --mem-fraction-static to at least",
                "--context-length 262144",
                "MiB are available",
            ],
            [],
        ),
    ],
)
def test_messages_show_values_and_only_flags_that_matter(capsys, words, has, has_not):
    code, out, _ = run(["--model-path", MODEL, *DEVICE, *words], capsys)
    line = next(line for line in out.splitlines() if line.startswith("no default plan: "))
    assert code == NO_PLAN and all(word in line for word in has), line
    assert not any(word in line for word in has_not), line


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
