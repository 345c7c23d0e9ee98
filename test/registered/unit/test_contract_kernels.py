"""Where kernel modules live, how their functions are called, and which launches they choose."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="unit")

FLA = "sglang.kernels.ops.attention.fla"
ALIASES = ("sglang.kernels.ops.attention.linear", "sglang.srt.layers.attention.fla")
SCATTER = "sglang.kernels.ops.mamba.mamba_state_scatter_triton"
REQUIRED = inspect.Parameter.empty

# (module, function, ((parameter, default), ...)); REQUIRED means no default.
UPDATE = (
    *(
        (name, REQUIRED)
        for name in "A_log a dt_bias softplus_beta softplus_threshold q k v b".split()
    ),
    ("initial_state_source", REQUIRED),
    ("initial_state_indices", REQUIRED),
    ("scale", None),
    ("use_qk_l2norm_in_kernel", False),
    ("cu_seqlens", None),
    ("is_kda", False),
    ("lower_bound", None),
    ("disable_state_update", False),
    ("intermediate_states_buffer", None),
    ("intermediate_state_indices", None),
    ("cache_steps", None),
    ("retrieve_parent_token", None),
    ("cache_ring", False),
    *((f"replayssm_{name}", None) for name in ("rawv", "rawk", "g", "beta")),
    ("match_cutedsl_decode", False),
    *((f"{name}_states_buffer", None) for name in "ukg"),
)
RECURRENT = (
    *((name, REQUIRED) for name in "qkvg"),
    *((name, None) for name in ("beta", "scale", "initial_state_source")),
    *((name, None) for name in ("initial_state_indices", "cu_seqlens")),
    *((f"{name}", False) for name in ("use_qk_l2norm_in_kernel", "disable_state_update")),
    ("disable_output_calculation", False),
    *((name, None) for name in ("intermediate_states_buffer", "intermediate_state_indices")),
    *((name, None) for name in ("cache_steps", "retrieve_parent_token")),
)
PACKED = (
    *((name, REQUIRED) for name in "mixed_qkv a b A_log dt_bias scale initial_state out".split()),
    ("ssm_state_indices", REQUIRED),
    ("use_qk_l2norm_in_kernel", False),
)
SCATTER_ONE = (
    *((name, REQUIRED) for name in ("dst", "src", "dst_indices_raw", "step_indices_raw")),
    ("src_indices_raw", None),
)
TRACK = (
    *((name, REQUIRED) for name in ("conv_states", "ssm_states", "cache_indices")),
    *((name, REQUIRED) for name in ("mamba_track_mask", "mamba_track_indices", "batch_size")),
    ("check_freed_slots", False),
)
SIGNATURES = (
    (f"{FLA}.fused_sigmoid_gating_recurrent", "fused_sigmoid_gating_delta_rule_update", UPDATE),
    (f"{FLA}.fused_recurrent", "fused_recurrent_gated_delta_rule_update", RECURRENT),
    (f"{FLA}.fused_recurrent", "fused_recurrent_gated_delta_rule_packed_decode", PACKED),
    (
        f"{FLA}.fused_gdn_gating",
        "fused_gdn_gating",
        (*((n, REQUIRED) for n in "A_log a b dt_bias".split()), ("beta", 1.0), ("threshold", 20.0)),
    ),
    (SCATTER, "fused_mamba_state_scatter_with_mask", SCATTER_ONE),
    (SCATTER, "fused_conv_window_scatter_with_mask", SCATTER_ONE),
    (
        SCATTER,
        "fused_conv_window_scatter_multi",
        (
            *((name, REQUIRED) for name in ("pairs", "dst_indices_raw", "step_indices_raw")),
            ("dst_indices2_raw", None),
            ("step_indices2_raw", None),
        ),
    ),
    (
        SCATTER,
        "scatter_mamba_states_after_mtp_verify",
        (
            *((name, REQUIRED) for name in ("mamba_caches", "state_indices_tensor")),
            *((name, REQUIRED) for name in ("last_correct_step_indices", "mamba_track_indices")),
            ("mamba_steps_to_track", REQUIRED),
            ("src_indices_raw", None),
            ("skip_ssm", False),
        ),
    ),
    (
        SCATTER,
        "fused_commit_track_indices",
        tuple(
            (name, REQUIRED)
            for name in "accept_index accept_lens seq_lens draft_token_num mamba_track_interval".split()
        ),
    ),
    (SCATTER, "track_mamba_states_if_needed", TRACK),
    (SCATTER, "track_mamba_states_all_layers", TRACK),
)


def imported(module: str):
    return importlib.import_module(module)


@pytest.mark.parametrize(("module", "name", "wanted"), SIGNATURES, ids=lambda v: str(v)[-40:])
def test_signatures_in_order_with_defaults(module, name, wanted):
    """Catches: a parameter renamed, moved, or given another default; a keyword-only one."""
    parameters = inspect.signature(getattr(imported(module), name)).parameters
    assert tuple((p.name, p.default) for p in parameters.values()) == wanted
    assert {p.kind for p in parameters.values()} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize(
    "name",
    [
        "fused_sigmoid_gating_recurrent",
        "fused_recurrent",
        "fused_gdn_gating",
        "chunk_delta_h",
    ],
)
def test_alias_is_the_same_module_object(alias, name):
    """Catches: a copy, whose replaced functions the wrapper would not see."""
    true = imported(f"{FLA}.{name}")
    assert imported(f"{alias}.{name}") is true
    assert true.__spec__.name == f"{FLA}.{name}"
    namespace: dict[str, object] = {}
    exec(f"from {alias} import {name} as found", namespace)
    assert namespace["found"] is true
    with pytest.raises(ModuleNotFoundError):
        imported(f"{alias}.no_such_module")


def test_fla_is_a_namespace_package():
    assert imported(FLA).__file__ is None
    from sglang.kernels.ops.attention.fla.chunk_delta_h import CHUNK_SIZE

    assert CHUNK_SIZE == 64


def test_launch_selection_signature():
    """Catches: cache_steps by position; packed_decode refused."""
    select = imported(f"{FLA}.fused_sigmoid_gating_recurrent")._select_recurrent_launch_config
    parameters = inspect.signature(select).parameters
    assert list(parameters) == [
        *("n", "h", "hv", "k", "v", "is_kda", "target_verify", "cache_steps", "packed_decode")
    ]
    assert [p.default for p in parameters.values()][6:] == [False, 0, False]
    assert [p.kind is p.KEYWORD_ONLY for p in parameters.values()] == [False] * 7 + [True] * 2
    assert imported(f"{FLA}.fused_recurrent")._select_recurrent_launch_config is select


# (sm, is_gfx95), (n, h, hv, k, v, is_kda), keywords, (BV, warps)
WIDE, NARROW = (32, 1), (4, 1)
GDN, TP4 = (16, 32, 128, 128, False), (4, 16, 128, 128, False)
VERIFY = {"target_verify": True}
LAUNCHES = (
    ((0, True), (1, *TP4), {}, (8, 4)),
    ((0, True), (1, *TP4), VERIFY, (8, 4)),
    ((0, True), (2, *TP4), {}, (16, 2)),
    ((0, True), (32, *TP4), VERIFY, (16, 2)),
    ((0, True), (33, *TP4), {}, WIDE),
    ((0, True), (3, 8, 32, 128, 128, False), {}, WIDE),
    ((0, True), (3, 4, 16, 128, 128, True), {}, WIDE),
    ((90, False), (1, *GDN), VERIFY, NARROW),
    ((90, False), (64, *GDN), VERIFY, NARROW),
    ((90, False), (65, *GDN), VERIFY, WIDE),
    ((90, False), (1, *GDN), {}, WIDE),
    ((90, False), (1, 16, 32, 64, 128, False), VERIFY, WIDE),
    ((90, False), (1, 16, 32, 128, 128, True), VERIFY, WIDE),
    ((90, False), (64, *GDN), {"packed_decode": True}, NARROW),
    ((90, False), (65, *GDN), {"packed_decode": True}, WIDE),
    ((100, False), (1, *GDN), VERIFY, WIDE),
    ((103, False), (1, *GDN), VERIFY, WIDE),
    ((103, False), (1, 8, 8, 128, 128, True), {**VERIFY, "cache_steps": 8}, NARROW),
    ((103, False), (1, 8, 8, 128, 128, True), {**VERIFY, "cache_steps": 4}, WIDE),
    ((103, False), (1, 8, 8, 128, 128, True), {"cache_steps": 8}, WIDE),
    ((107, False), (5, 16, 16, 128, 128, True), VERIFY, NARROW),
    ((107, False), (5, 16, 16, 128, 128, True), {}, WIDE),
    ((80, False), (1, 2, 4, 16, 24, False), VERIFY, WIDE),
    ((0, False), (1, 2, 4, 16, 9, False), {}, (16, 1)),
)


@pytest.mark.parametrize(("device", "shape", "keywords", "wanted"), LAUNCHES, ids=str)
def test_launch_table(device, shape, keywords, wanted, monkeypatch):
    """Catches: narrow tiles where they are not known to be bit-identical, or missing where they are."""
    launch = imported(f"{FLA}.recurrent_launch")
    module = imported(f"{FLA}.fused_sigmoid_gating_recurrent")
    traits = launch.DeviceTraits(sm=device[0], is_gfx95=device[1])
    monkeypatch.setattr(module, "current_device_traits", lambda: traits)
    assert module._select_recurrent_launch_config(*shape, **keywords) == wanted


def test_stages_and_text_of_the_gating_module():
    """Catches: a beta that is narrowed before it is stored."""
    assert imported(f"{FLA}.recurrent_launch").NUM_STAGES == 3
    module = imported(f"{FLA}.fused_gdn_gating")
    source = Path(module.__file__).read_text(encoding="utf-8")
    calls = [ast.unparse(n) for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Call)]
    stores = [call for call in calls if call.startswith("tl.store(beta_output")]
    assert stores and not any(".to(" in call for call in stores)
    allocations = [line for line in source.splitlines() if "beta_output = torch.empty(" in line]
    assert allocations and all("torch.float32" in line for line in allocations)


def test_gating_values_on_cpu():
    """Catches: beta in b's dtype, a row stride ignored, the linear branch of softplus."""
    gating = imported(f"{FLA}.fused_gdn_gating").fused_gdn_gating
    torch.manual_seed(3)
    packed = torch.randn(5, 16, dtype=torch.bfloat16)
    b, a = packed.split(8, dim=-1)
    a_log, dt_bias = torch.randn(8), torch.randn(8)
    dt_bias[0] = 60.0
    g, beta = gating(a_log, a, b, dt_bias)
    assert g.shape == beta.shape == (1, 5, 8)
    assert g.dtype == beta.dtype == torch.float32
    assert torch.equal(beta[0], b.float().sigmoid())
    assert not torch.equal(beta[0], b.sigmoid().float())
    want = -a_log.exp() * torch.nn.functional.softplus(a.float() + dt_bias)
    assert torch.allclose(g[0], want)
    assert torch.allclose(g[0, :, 0], -a_log[0].exp() * (a[:, 0].float() + 60.0))


def test_options_of_other_recurrences_are_refused():
    """Catches: an option of another recurrence that is taken and then ignored."""
    update = imported(f"{FLA}.fused_sigmoid_gating_recurrent")
    update = update.fused_sigmoid_gating_delta_rule_update
    names = [name for name, default in UPDATE if default is REQUIRED]
    values = {name: torch.zeros(1, 1, 1, 8) for name in names}
    with pytest.raises(ValueError, match="match_cutedsl_decode"):
        update(**values, match_cutedsl_decode=True)
    with pytest.raises(ValueError, match="ReplaySSM"):
        update(**values, cache_ring=True)


def test_causal_conv_signature():
    conv = imported("sglang.kernels.ops.mamba.causal_conv1d_triton")
    parameters = inspect.signature(conv.causal_conv1d_update).parameters
    assert list(parameters)[:14] == [
        *("x", "conv_state", "weight", "bias", "activation", "cache_seqlens"),
        *("conv_state_indices", "num_accept_tokens", "intermediate_conv_window"),
        *("intermediate_state_indices", "retrieve_next_token", "retrieve_next_sibling"),
        *("retrieve_parent_token", "pad_slot_id"),
    ]
    defaults = [p.default for p in parameters.values()][:14]
    assert defaults == [REQUIRED] * 3 + [None] * 10 + [conv.PAD_SLOT_ID] and conv.PAD_SLOT_ID == -1


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
