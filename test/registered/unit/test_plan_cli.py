"""``sglang plan``: the table, JSON, the picture, and what happens when it does not fit."""

from __future__ import annotations

import builtins
import json
import subprocess
import sys

import pytest

from sglang.srt.mem_cache import plan_plot
from sglang.srt.mem_cache.memory_plan import build_pools, check_allocated
from sglang.srt.mem_cache.plan_cli import BAD_ARGUMENTS, NO_PLAN, main
from sglang.srt.mem_cache.plan_inputs import MemoryPlanError
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.plan_cases import CONFIGS, model, plan, tiny_config

register_cpu_ci(est_time=8, suite="unit")

MODEL = str(CONFIGS / "Qwen3.6-35B-A3B-FP8.json")
PUBLISHED = [
    "--model-path", MODEL, "--device-memory-gb", "80", "--mem-fraction-static", "0.8",
    "--kv-cache-dtype", "bf16", "--page-size", "64", "--max-running-requests", "25",
    "--max-mamba-cache-size", "150", "--speculative-algorithm", "NEXTN",
]  # fmt: skip


def lines_of(text):
    return {line.strip().split("  ")[0]: line for line in text.splitlines()}


def test_table_shows_both_plans(capsys):
    assert main(PUBLISHED) == 0
    lines = lines_of(capsys.readouterr().out)
    tokens = lines["max_total_num_tokens"].split()
    assert tokens[1:4] == ["697,344", "986,624", "+289,280"]
    assert "6.09 GiB" in lines["of it recurrent state"]
    assert lines["max_running_requests, effective"].split()[-2:] == ["25", "25"]
    assert lines["KV bytes per token, draft"].split()[-1] == "2,048"
    for label in ("weights", "state slots", "verify scratch", "largest request, tokens"):
        assert label in lines


def test_json_has_every_tensor(capsys):
    assert main([*PUBLISHED, "--json", "--enable-linear-lossless-verify"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["asked"] == "lossless"
    plans = result["plans"]
    for made in plans.values():
        assert sum(t["bytes"] for t in made["tensors"]) == made["pool_bytes"]
        names = [t["name"] for t in made["tensors"]]
        assert len(set(names)) == len(names)
    default, lossless = plans["default"], plans["lossless"]
    assert lossless["lossless_bytes_freed"] == 6_517_155_840
    assert default["verify_scratch_charged_bytes"] == 6_696_468_480
    assert lossless["max_total_num_tokens"] - default["max_total_num_tokens"] == 289_280


def test_no_gpu_no_weights_no_torch():
    """The command must work where torch is not installed."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from sglang.srt.mem_cache.plan_cli import main\n"
        f"raise SystemExit(main({PUBLISHED!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "986,624" in done.stdout


def test_without_speculation_only_the_default_is_planned(capsys):
    assert main(["--model-path", MODEL, "--device-memory-gb", "80"]) == 0
    out = capsys.readouterr().out
    assert "no lossless plan: --enable-linear-lossless-verify needs speculative decoding" in out


def test_flags_of_larger_deployments_are_planned(capsys):
    """The planner is not bound to what one build can serve."""
    words = [
        "--tp-size",
        "2",
        "--speculative-algorithm",
        "DFLASH",
        "--speculative-draft-model-path",
    ]
    drafter = str(CONFIGS / "Qwen3.8-27B-DFlash2.json")
    target = str(CONFIGS / "Qwen3.8-27B.json")
    assert main(["--model-path", target, "--device-memory-gb", "80", *words, drafter]) == 0
    lines = lines_of(capsys.readouterr().out)
    assert lines["KV bytes per token, target"].split()[-1] == "32,768"
    assert lines["KV bytes per token, draft"].split()[-1] == "10,240"
    assert "of 2 rank(s)" in next(iter(lines))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model-path", "/nowhere", "--device-memory-gb", "80"], "no config.json at '/nowhere'"),
        (["--model-path", MODEL, "--device", "cuda"], "--device-memory-gb is needed"),
        (["--model-path", MODEL, "--device-memory-gb", "-1"], "--device-memory-gb must be above 0"),
        (
            ["--model-path", MODEL, "--device-memory-gb", "80", "--speculative-num-steps", "3"],
            "--speculative-num-steps 3 needs --speculative-algorithm",
        ),
    ],
)
def test_wrong_arguments(capsys, words, message):
    assert main(words) == BAD_ARGUMENTS
    assert message in capsys.readouterr().err


def test_a_plan_that_cannot_be_is_told_with_bytes(capsys):
    assert main(["--model-path", MODEL, "--device-memory-gb", "30"]) == NO_PLAN
    out = capsys.readouterr().out
    assert "no default plan: weights, draft weights and request rows need" in out
    assert "GiB" in out and "use a larger device" in out


def test_only_the_flag_makes_it_fit(capsys):
    """27B with DFlash2 on a tight budget: the default has no room, lossless has."""
    words = [
        "--model-path", str(CONFIGS / "Qwen3.8-27B-FP8.json"), "--device-memory-gb", "48",
        "--speculative-algorithm", "DFLASH", "--speculative-draft-model-path",
        str(CONFIGS / "Qwen3.8-27B-DFlash2.json"), "--max-running-requests", "8",
        "--max-mamba-cache-size", "40",
    ]  # fmt: skip
    assert main(words) == NO_PLAN
    out = capsys.readouterr().out
    assert "turn on --enable-linear-lossless-verify" in out
    assert main([*words, "--enable-linear-lossless-verify"]) == 0
    assert "max_total_num_tokens" in capsys.readouterr().out


def test_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra [plot])")
    file = tmp_path / "plan.png"
    assert main([*PUBLISHED, "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 10_000
    assert main([*PUBLISHED, "--plot", str(tmp_path / "none" / "plan.png")]) == BAD_ARGUMENTS


def test_plot_without_matplotlib_says_what_to_install(monkeypatch, tmp_path, capsys):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert main([*PUBLISHED, "--plot", str(tmp_path / "plan.png")]) == BAD_ARGUMENTS
    assert "pip install 'sglang-lossless[plot]'" in capsys.readouterr().err


def test_what_the_picture_shows():
    """Scratch grows with draft width; tuples stay far below snapshots and buy tokens."""
    from sglang.test.plan_cases import GIB, server_args

    args = server_args(max_running_requests=8, max_mamba_cache_size=40)
    points = plan_plot.sweep(
        model("Qwen3.6-35B-A3B-FP8"), args, 80 * GIB, (2, 4, 8), plan_plot._with_width
    )
    scratch = {n: [p.verify_scratch_bytes for _, p in series] for n, series in points.items()}
    assert scratch["default"] == sorted(scratch["default"])
    assert all(20 * a < b for a, b in zip(scratch["lossless"], scratch["default"]))
    tokens = [[p.max_total_num_tokens for _, p in series] for series in points.values()]
    assert all(a < b for a, b in zip(*tokens))


def refusal(config=None, memory_gib=80, **changes):
    with pytest.raises(MemoryPlanError) as caught:
        plan(config or model("Qwen3.6-35B-A3B-FP8"), memory_gib, **changes)
    return str(caught.value)


def test_workable_fractions_form_one_interval():
    """Below it the message says raise, above it lower, and the named values work."""
    config = model("Qwen3.6-35B-A3B-FP8")
    verdicts = []
    for thousandths in range(300, 1000, 20):
        try:
            plan(config, mem_fraction_static=thousandths / 1000, max_running_requests=8)
            verdicts.append("ok")
        except MemoryPlanError as error:
            verdicts.append("raise" if "raise --mem-fraction-static" in str(error) else "lower")
            if verdicts[-1] == "lower":
                assert "lower it to at most" in str(error)
    runs = [v for i, v in enumerate(verdicts) if i == 0 or verdicts[i - 1] != v]
    assert runs == ["raise", "ok", "lower"]


@pytest.mark.parametrize("fraction", [0.3, 0.42, 0.45])
@pytest.mark.parametrize("slots", [40, None])
def test_the_fraction_that_a_message_names_works(fraction, slots):
    flags = {"max_running_requests": 8, "max_mamba_cache_size": slots}
    if slots is None:
        fraction = min(fraction, 0.42)
    text = refusal(mem_fraction_static=fraction, **flags)
    named = float(text.split("raise --mem-fraction-static to at least ")[1].split(",")[0])
    plan(model("Qwen3.6-35B-A3B-FP8"), mem_fraction_static=named, **flags)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mem_fraction_static": 0.999}, ["lower it to at most", "which need"]),
        ({"max_mamba_cache_size": 4}, ["--max-mamba-cache-size 4 serves no request", "raise it"]),
        ({"max_total_tokens": 10}, ["--max-total-tokens 10 holds no request", "raise it"]),
        (
            {"max_mamba_cache_size": 900},
            ["no memory is left for KV", "lower --max-mamba-cache-size", "turn on --enable-linear"],
        ),
        (
            {"disable_radix_cache": True, "max_running_requests": 300},
            ["no memory is left for KV", "lower --max-running-requests"],
        ),
        (
            {"memory_gib": 38.1, "max_running_requests": 1, "cuda_graph_bs": [1]},
            [
                "recurrent state needs",
                "raise --mamba-full-memory-ratio above",
                "--max-mamba-cache-size 5",
            ],
        ),
        ({"tp_size": 3}, ["--tp-size 3"]),
        ({"speculative_algorithm": "STANDALONE"}, ["STANDALONE", "no memory plan"]),
        ({"speculative_algorithm": "DFLASH"}, ["needs --speculative-draft-model-path"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_impossible_combinations(changes, words):
    """Every message names the flag, the amount, and the direction."""
    if "tp_size" in changes:
        with pytest.raises(ValueError, match="--tp-size 3"):
            plan(model("Qwen3.6-35B-A3B-FP8"), **changes)
        return
    text = refusal(**changes)
    for word in words:
        assert word in text


def test_concurrency_that_the_state_pool_cannot_serve_is_said():
    made = plan(model("Qwen3.6-35B-A3B-FP8"), max_running_requests=48, max_mamba_cache_size=100)
    assert made.max_running_requests == 20 and made.requested_max_running_requests == 48
    assert "--max-running-requests 48 becomes 20" in made.notes[0]
    assert "raise --max-mamba-cache-size to 240" in made.notes[0]
    assert made.verify_rows == 21, "rows follow what can run"


def test_largest_request_is_said_when_below_the_context():
    made = plan(model("Qwen3.6-35B-A3B-FP8"), max_total_tokens=100_000)
    assert made.max_total_num_tokens == 99_968
    assert made.largest_request_tokens == 99_964, "one verify's rows are kept free"
    assert any("99964 tokens, below the context length 262144" in note for note in made.notes)


def test_adaptive_widths_size_every_buffer_for_the_widest(tmp_path):
    """Seven steps are in the built-in table; a file's widest candidate counts as well."""
    config = tiny_config()
    flags = {"context_length": 512, "max_running_requests": 4, "speculative_adaptive": True}
    assert plan(config, 8, **flags).draft_tokens == 8
    file = tmp_path / "adaptive.json"
    file.write_text(json.dumps({"candidate_steps": [1], "8": {"candidate_steps": [2, 11]}}))
    made = plan(config, 8, speculative_adaptive_config=str(file), **flags)
    assert made.draft_tokens == 12
    ring = plan(config, 8, enable_linear_lossless_verify=True, **flags)
    shapes = {spec.name: spec.shape for spec in ring.tensors}
    assert shapes["state.intermediate_ssm_u"][2] == 8


def test_drafts_and_graphs_are_paid_before_pools_are_sized():
    """Catches pools that take the room of draft weights or of captured graphs."""
    config = model("Qwen3.6-35B-A3B-FP8")
    flags = {"max_mamba_cache_size": 40, "max_running_requests": 8}
    drafted = plan(config, mem_fraction_static=0.8, **flags)
    ngram = plan(config, mem_fraction_static=0.8, speculative_algorithm="NGRAM", **flags)
    assert drafted.draft_weight_bytes == 853_668_480 and ngram.draft_weight_bytes == 0
    assert drafted.max_total_num_tokens < ngram.max_total_num_tokens
    few = plan(config, cuda_graph_bs=[1], **flags)
    many = plan(config, cuda_graph_bs=list(range(1, 257)), **flags)
    names = [line.name for line in many.reserves]
    assert "graph capture" in names and "activations" in names
    assert many.max_total_num_tokens < few.max_total_num_tokens


def test_unresolved_arguments_are_refused():
    with pytest.raises(MemoryPlanError, match="not resolved"):
        plan(model("Qwen3.6-35B-A3B"), page_size=None)


def test_without_a_prefix_cache_a_default_concurrency_does_not_size_the_pool():
    """Nobody asked for 128 requests, so the budget decides; asking for them does."""
    flags = {"disable_radix_cache": True, "speculative_algorithm": None}
    made = plan(model("Qwen3.6-35B-A3B-FP8"), 40, max_running_requests=None, **flags)
    assert made.sizing_branch == 3 and made.max_running_requests < 128
    asked = plan(model("Qwen3.6-35B-A3B-FP8"), 80, max_running_requests=12, **flags)
    assert asked.sizing_branch == 2 and asked.max_mamba_cache_size == 12


def test_a_deferred_commit_needs_a_longer_ring():
    """Accepted tuples wait there for the next verify: two of the widest verifies must fit."""
    flags = {"enable_linear_lossless_verify": True, "linear_lossless_commit": "deferred"}
    for width, cells in ((4, 16), (12, 24)):
        made = plan(
            model("Qwen3.6-35B-A3B-FP8"),
            speculative_num_steps=width - 1,
            speculative_num_draft_tokens=width,
            **flags,
        )
        shapes = {spec.name: spec.shape for spec in made.tensors}
        assert shapes["state.intermediate_ssm_g"][2] == cells
        assert shapes["state.intermediate_conv_window.0"][-1] == width + 2
        check_allocated(made, build_pools(made, "meta"))


def test_a_prefill_server_has_no_verify_scratch():
    made = plan(model("Qwen3.6-35B-A3B-FP8"), disaggregation_mode="prefill")
    assert made.verify_rows == made.verify_scratch_bytes == 0 and made.draft_tokens is None


def test_requests_in_transfer_have_no_verify_row():
    """F38: scratch is for requests that can verify at once, on a decode server too."""
    flags = {"max_running_requests": 8, "max_mamba_cache_size": 100}
    for mode in ("null", "decode"):
        made = plan(model("Qwen3.6-35B-A3B-FP8"), disaggregation_mode=mode, **flags)
        assert made.verify_rows == 8 + 1


def test_plan_follows_the_state_dtype_but_tuples_stay_fp32():
    kwargs = {"mamba_ssm_dtype": "bfloat16", "max_mamba_cache_size": 40, "max_running_requests": 8}
    made = plan(model("Qwen3.6-35B-A3B"), enable_linear_lossless_verify=True, **kwargs)
    dtypes = {spec.name: spec.dtype for spec in made.tensors}
    assert dtypes["state.temporal"] == "bfloat16"
    assert {dtypes[f"state.intermediate_ssm_{x}"] for x in "ukg"} == {"float32"}


def test_server_log_lines():
    text = plan(model("Qwen3.6-35B-A3B-FP8"), enable_linear_lossless_verify=True).describe()
    assert "max_total_num_tokens" in text and "set aside: activations" in text
    assert "update tuples float32" in text


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
