"""Every row of the accept/reject table of --enable-linear-lossless-verify.

The function is called directly on records that were not resolved, as well as through the pipeline:
a record with a placeholder for a model never reaches it there.
"""

from __future__ import annotations

import pytest

from sglang.srt.arg_groups import attention_hook
from sglang.srt.arg_groups.attention_hook import (
    LOSSLESS_FLAG,
    LOSSLESS_RULES,
    effective_verify_backend,
    validate_linear_lossless_verify,
)
from sglang.srt.arg_groups.pipeline import run_resolution_pipeline
from sglang.srt.environ import envs
from sglang.srt.server_args import ServerArgs
from sglang.test.args_fixtures import write_model_config
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit")


def lossless(**values) -> ServerArgs:
    base = {
        "speculative_algorithm": "EAGLE",
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
        "device": "cuda",
        "enable_linear_lossless_verify": True,
    }
    return ServerArgs(model_path="dummy", **{**base, **values})


ACCEPTED = [
    *({"speculative_algorithm": name} for name in ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")),
    {"speculative_algorithm": "DFLASH"},
    {"speculative_algorithm": "DFLASH", "speculative_eagle_topk": None},
    {"speculative_algorithm": "DSPARK", "speculative_eagle_topk": None},
    # Not resolved yet: the handlers of these two will force topk to 1.
    {"speculative_algorithm": "DFLASH", "speculative_eagle_topk": 4},
    {"speculative_eagle_topk": None},
    {"device": "cpu"},
    {"device": "cpu", "linear_attn_verify_backend": "torch_native"},
    {"linear_attn_decode_backend": "flashinfer", "linear_attn_verify_backend": "triton"},
    {"linear_attn_prefill_backend": "flashinfer"},
]

REJECTED = [
    ("no algorithm", {"speculative_algorithm": None}, "add --speculative-algorithm NEXTN"),
    ("tree", {"speculative_eagle_topk": 4}, "--speculative-eagle-topk 1, got 4"),
    ("ngram", {"speculative_algorithm": "NGRAM"}, "--speculative-algorithm NGRAM"),
    # NGRAM sets topk to its breadth, which may be 1: the rule must not rely on topk.
    (
        "ngram",
        {"speculative_algorithm": "NGRAM", "speculative_ngram_max_bfs_breadth": 1},
        "--speculative-algorithm NGRAM",
    ),
    ("unknown algorithm", {"speculative_algorithm": "UNO"}, "--speculative-algorithm UNO"),
    ("replayssm", {"enable_linear_replayssm": True}, "--enable-linear-replayssm exclude"),
    ("replayssm", {"enable_linear_replayssm_spec": True}, "--enable-linear-replayssm-spec exclude"),
    (
        "verify backend",
        {"linear_attn_verify_backend": "flashinfer"},
        "flashinfer would run; pass --linear-attn-verify-backend triton",
    ),
    (
        "verify backend",
        {"linear_attn_decode_backend": "flashinfer"},
        "pass --linear-attn-verify-backend triton",
    ),
    (
        "verify backend",
        {"linear_attn_backend": "flashinfer"},
        "pass --linear-attn-verify-backend triton",
    ),
    ("unified memory", {"enable_unified_memory": True}, "--enable-unified-memory"),
    ("platform", {"device": "xpu"}, "--device xpu"),
    ("platform", {"device": "npu"}, "--device npu"),
]


@pytest.mark.parametrize("values", ACCEPTED, ids=str)
def test_accepted(values):
    assert validate_linear_lossless_verify(lossless(**values)) is None


@pytest.mark.parametrize(("rule", "values", "gist"), REJECTED, ids=lambda v: str(v))
def test_rejected_with_flag_value_and_way_out(rule, values, gist):
    args = lossless(**values)
    broken = [r.name for r in LOSSLESS_RULES if r.broken(args)]
    assert rule in broken
    with pytest.raises(ValueError) as error:
        validate_linear_lossless_verify(args)
    assert LOSSLESS_FLAG in str(error.value) and gist in str(error.value)


@pytest.mark.parametrize(("rule", "values", "gist"), REJECTED, ids=lambda v: str(v))
def test_flag_off_accepts_everything(rule, values, gist):
    args = lossless(**{**values, "enable_linear_lossless_verify": False})
    assert validate_linear_lossless_verify(args) is None


@pytest.mark.parametrize("mode", ["cap-accept", "compact", "nonsense"])
def test_ragged_verify_is_rejected(mode):
    with envs.SGLANG_RAGGED_VERIFY_MODE.override(mode):
        with pytest.raises(ValueError, match=f"SGLANG_RAGGED_VERIFY_MODE=static, got {mode}"):
            validate_linear_lossless_verify(lossless())
    with envs.SGLANG_RAGGED_VERIFY_MODE.override("static"):
        validate_linear_lossless_verify(lossless())


def test_every_rule_has_a_row_here():
    rules = {rule for rule, _, _ in REJECTED} | {"ragged verify"}
    assert rules == {rule.name for rule in LOSSLESS_RULES}


def test_all_broken_rules_are_named_at_once():
    with pytest.raises(ValueError) as error:
        validate_linear_lossless_verify(
            lossless(speculative_eagle_topk=2, enable_unified_memory=True)
        )
    assert "got 2" in str(error.value) and "--enable-unified-memory" in str(error.value)


def test_deferred_commit_needs_the_flag():
    args = lossless(enable_linear_lossless_verify=False, linear_lossless_commit="deferred")
    with pytest.raises(
        ValueError, match=f"--linear-lossless-commit deferred needs {LOSSLESS_FLAG}"
    ):
        validate_linear_lossless_verify(args)
    validate_linear_lossless_verify(lossless(linear_lossless_commit="deferred"))


def test_the_device_is_looked_for_when_it_is_left_open(monkeypatch):
    args = lossless(device="auto", linear_attn_verify_backend="flashinfer")
    monkeypatch.setattr(attention_hook, "detect_device", lambda: "cuda")
    with pytest.raises(ValueError, match="--linear-attn-verify-backend triton"):
        validate_linear_lossless_verify(args)
    monkeypatch.setattr(attention_hook, "detect_device", lambda: "cpu")
    validate_linear_lossless_verify(args)


@pytest.mark.parametrize(
    ("values", "backend"),
    [
        ({}, "triton"),
        ({"linear_attn_decode_backend": "flashinfer"}, "flashinfer"),
        ({"linear_attn_backend": "flashinfer"}, "flashinfer"),
        ({"linear_attn_backend": "flashinfer", "linear_attn_decode_backend": "triton"}, "triton"),
        ({"linear_attn_backend": "torch_native"}, "triton"),
        (
            {"linear_attn_verify_backend": "triton", "linear_attn_decode_backend": "flashinfer"},
            "triton",
        ),
    ],
    ids=str,
)
def test_effective_verify_backend(values, backend):
    assert effective_verify_backend(lossless(**values)) == backend


def test_pipeline_reaches_it(tmp_path):
    model = write_model_config(tmp_path / "model")
    args = ServerArgs(model, device="cpu", enable_linear_lossless_verify=True)
    with pytest.raises(ValueError, match="needs speculative decoding"):
        run_resolution_pipeline(args)
    args.speculative_algorithm = "NEXTN"
    resolved = run_resolution_pipeline(args)
    assert resolved.enable_linear_lossless_verify and resolved.speculative_eagle_topk == 1


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
