"""The flag, its place among the arguments, its documentation and its validator, as outside callers use them."""

from __future__ import annotations

import argparse
import inspect
import re

import pytest

from sglang.srt.arg_groups import attention_hook, pipeline
from sglang.srt.arg_groups.attention_hook import validate_linear_lossless_verify
from sglang.srt.arg_groups.basic_hook import handle_device
from sglang.srt.arg_groups.field_order import POSITIONAL_FIELD_ORDER
from sglang.srt.arg_groups.fields.exec_ import MambaFields
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_context, get_exec
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.srt.speculative.ragged_verify import RaggedVerifyMode, read_ragged_verify_mode
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.repo import ROOT

register_cpu_ci(est_time=4, suite="unit")

FLAG = "--enable-linear-lossless-verify"
PAGE = ROOT / "docs" / "docs" / "advanced_features" / "server_arguments.mdx"


def args(**values) -> ServerArgs:
    base = {
        "speculative_algorithm": "EAGLE",
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
        "enable_linear_lossless_verify": True,
        "device": "cuda",
    }
    return ServerArgs(model_path="dummy", **{**base, **values})


def test_field_and_flag():
    assert ServerArgs("dummy").enable_linear_lossless_verify is False
    names = list(MambaFields.__dataclass_fields__)
    at = names.index("enable_linear_lossless_verify")
    assert names[at - 1] == "enable_linear_replayssm_spec"
    assert prepare_server_args(["--model-path", "x", FLAG]).enable_linear_lossless_verify is True
    assert prepare_server_args(["--model-path", "x"]).enable_linear_lossless_verify is False
    with get_context().override_server_args(enable_linear_lossless_verify=True):
        assert get_exec().mamba.enable_linear_lossless_verify is True
    with get_context().override_server_args(model_path="none"):
        assert get_exec().mamba.enable_linear_lossless_verify is False


def test_positional_order():
    """Catches: a new field inserted before an old one; a field that no position reaches."""
    order = list(inspect.signature(ServerArgs).parameters)
    assert tuple(order[: len(POSITIONAL_FIELD_ORDER)]) == POSITIONAL_FIELD_ORDER
    assert len(set(POSITIONAL_FIELD_ORDER)) == len(POSITIONAL_FIELD_ORDER)
    assert sorted(order) == sorted(flag.name for flag in ServerArgs.flags())
    record = ServerArgs("dummy")
    values = [getattr(record, name) for name in order]
    values[order.index("enable_linear_lossless_verify")] = True
    assert ServerArgs(*values).enable_linear_lossless_verify is True
    assert order.index("enable_linear_lossless_verify") >= len(POSITIONAL_FIELD_ORDER) or (
        POSITIONAL_FIELD_ORDER[-1] == "enable_linear_lossless_verify"
    )


@pytest.mark.parametrize(
    ("name", "default"),
    [
        ("linear_attn_backend", "triton"),
        ("linear_attn_decode_backend", None),
        ("linear_attn_prefill_backend", None),
        ("linear_attn_verify_backend", None),
        ("mamba_radix_cache_strategy", "auto"),
        ("mamba_track_interval", 256),
        ("max_mamba_cache_size", None),
        ("enable_unified_memory", False),
        ("linear_replayssm_cache_len", 16),
        ("enable_linear_replayssm", False),
        ("enable_linear_replayssm_spec", False),
    ],
)
def test_related_defaults(name, default):
    assert getattr(ServerArgs("dummy"), name) == default


def flags_in(cell: str) -> set[str]:
    pairs = re.findall(r"`(--[a-zA-Z0-9][\w-]*)`|<code>(--[a-zA-Z0-9][\w-]*)</code>", cell)
    return {first or second for first, second in pairs}


def test_every_live_flag_has_a_row_of_four_cells():
    """Catches: an undocumented flag, a mention of a flag that is gone, a row with a cell missing."""
    page = PAGE.read_text(encoding="utf-8")
    rows = [
        re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)
        for row in re.findall(r"<tr[^>]*>(.*?)</tr>", page, re.DOTALL)
    ]
    rows = [cells for cells in rows if cells]
    assert [cells[0] for cells in rows if len(cells) != 4] == []
    documented = [flag for cells in rows for flag in flags_in(cells[0])]
    parser = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    registered = {option for action in parser._actions for option in action.option_strings}
    assert FLAG in registered
    assert sorted(documented) == sorted(registered)
    assert {flag for cells in rows for cell in cells for flag in flags_in(cell)} <= registered


def test_place_in_the_pipeline():
    """After topk is final; through run_hook; not for a placeholder model."""
    steps = [step.__name__ for step in pipeline.STEPS]
    at = steps.index("validate_linear_lossless_verify")
    assert at > steps.index("handle_speculative_decoding")
    assert steps.index("handle_linear_attn_backend") < steps.index("handle_speculative_decoding")
    assert "run_hook" in inspect.getsource(pipeline.run_resolution_pipeline)
    pipeline.run_resolution_pipeline(args(speculative_eagle_topk=4))


ACCEPT = (
    *({"speculative_algorithm": name} for name in ("EAGLE", "EAGLE3", "NEXTN")),
    {"speculative_algorithm": "STANDALONE"},
    *({"speculative_algorithm": name} for name in ("DFLASH", "DSPARK")),
    {"linear_attn_verify_backend": "triton", "linear_attn_decode_backend": "flashinfer"},
)
REJECT = (
    ({"speculative_algorithm": None}, "speculative"),
    ({"speculative_eagle_topk": 3}, "--speculative-eagle-topk 1.*3"),
    ({"speculative_algorithm": "NGRAM", "speculative_ngram_max_bfs_breadth": 1}, "NGRAM"),
    ({"speculative_algorithm": "NGRAM", "speculative_ngram_max_bfs_breadth": 8}, "NGRAM"),
    ({"enable_linear_replayssm": True}, "--enable-linear-replayssm"),
    ({"enable_linear_replayssm_spec": True}, "--enable-linear-replayssm-spec"),
    ({"linear_attn_verify_backend": "flashinfer"}, "--linear-attn-verify-backend triton"),
    ({"linear_attn_decode_backend": "flashinfer"}, "--linear-attn-verify-backend triton"),
    ({"linear_attn_backend": "flashinfer"}, "--linear-attn-verify-backend triton"),
    ({"enable_unified_memory": True}, "--enable-unified-memory"),
    ({"device": "npu"}, "npu"),
    ({"device": "xpu"}, "xpu"),
    ({"speculative_algorithm": "UNO"}, "UNO"),
)


@pytest.mark.parametrize("values", ACCEPT, ids=str)
def test_accepted(values):
    assert validate_linear_lossless_verify(args(**values)) is None


@pytest.mark.parametrize(("values", "gist"), REJECT, ids=str)
def test_rejected(values, gist):
    with pytest.raises(ValueError, match=gist):
        validate_linear_lossless_verify(args(**values))
    off = args(**{**values, "enable_linear_lossless_verify": False})
    assert validate_linear_lossless_verify(off) is None


def test_ragged_modes():
    assert [m.value for m in RaggedVerifyMode] == ["static", "cap-accept", "compact"]
    assert RaggedVerifyMode.CAP_ACCEPT == "cap-accept" and isinstance(RaggedVerifyMode.STATIC, str)
    assert read_ragged_verify_mode() is RaggedVerifyMode.STATIC
    for mode in RaggedVerifyMode:
        with envs.SGLANG_RAGGED_VERIFY_MODE.override(mode.value):
            assert read_ragged_verify_mode() is mode
            if mode is RaggedVerifyMode.STATIC:
                validate_linear_lossless_verify(args())
                continue
            with pytest.raises(ValueError, match="SGLANG_RAGGED_VERIFY_MODE"):
                validate_linear_lossless_verify(args())
    with envs.SGLANG_RAGGED_VERIFY_MODE.override("sometimes"):
        with pytest.raises(ValueError, match="sometimes"):
            read_ragged_verify_mode()


def test_states_that_the_cpu_engine_does_not_read():
    """Catches: a type that is accepted at start and fails at the first request."""
    for name in ("float32", "bfloat16", None):
        handle_device(ServerArgs("dummy", device="cpu", mamba_ssm_dtype=name))
    with pytest.raises(ValueError, match="--mamba-ssm-dtype float16 is for GPUs"):
        handle_device(ServerArgs("dummy", device="cpu", mamba_ssm_dtype="float16"))


def test_the_validator_is_a_name_of_its_module():
    assert attention_hook.validate_linear_lossless_verify is validate_linear_lossless_verify
    assert list(inspect.signature(validate_linear_lossless_verify).parameters) == ["server_args"]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
