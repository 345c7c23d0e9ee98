"""`HybridLinearAttnBackend` as outside callers use it: unbound on namespaces, built of mocks, patched."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import pytest
import torch

import sglang.srt
from sglang.srt.environ import envs
from sglang.srt.layers.attention import hybrid_linear_attn_backend as hybrid
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="unit")

Backend = hybrid.HybridLinearAttnBackend
L, S, R, D, HV, V, K = 2, 9, 6, 4, 2, 4, 8
SLOTS, ROWS = [3, 1, 5], [4, 0, 2]
STEPS, TRACKS, TRACK_STEPS = [2, -1, 3], [7, 8, -1], [1, 0, 2]
MODULE = "sglang.srt.layers.attention.hybrid_linear_attn_backend"


def make_caches(lossless: bool) -> SimpleNamespace:
    torch.manual_seed(0)
    tuples = (torch.randn(L, R, D, HV, V), torch.randn(L, R, D, HV, K), -torch.rand(L, R, D, HV))
    caches = SimpleNamespace(
        temporal=torch.randn(L, S, HV, V, K),
        conv=[torch.randn(L, S, 6, 3)],
        intermediate_conv_window=[torch.randn(L, R, D, 6, 3)],
        intermediate_ssm=None if lossless else torch.randn(L, R, D, HV, V, K),
        intermediate_ssm_u=None,
        intermediate_ssm_k=None,
        intermediate_ssm_g=None,
    )
    if lossless:
        caches.intermediate_ssm_u, caches.intermediate_ssm_k, caches.intermediate_ssm_g = tuples
    return caches


def namespaces(caches: object, **linear_values: object) -> tuple[SimpleNamespace, list]:
    """A backend with exactly the attributes that a commit may touch, and its side-state calls."""
    calls: list[tuple] = []
    pool = SimpleNamespace(
        get_speculative_mamba2_params_all_layers=lambda: caches,
        get_mamba_indices=lambda rows: pytest.fail("slots were derived without stable rows"),
        mamba_pool=SimpleNamespace(replayssm_is_kda=False),
        short_conv_pool=None,
        ngram_pool=None,
    )
    values = {
        "_translate_mamba_indices": lambda x: x,
        "forward_metadata": SimpleNamespace(mamba_cache_indices=torch.tensor([*SLOTS, 6])),
        "req_to_token_pool": pool,
        "accept_lens_pool": None,
        "verify_intermediate_state_indices": torch.arange(R, dtype=torch.int32),
    }
    linear = SimpleNamespace(**{**values, **linear_values})
    # Positional arguments only: a keyword would be a TypeError here.
    backend = SimpleNamespace(
        linear_attn_backend=linear,
        _update_ple_state_after_mtp_verify=lambda *args: calls.append(args),
    )
    return backend, calls


def commit(backend: object, *, track: bool = True, rows: list[int] | None = None) -> None:
    Backend.update_mamba_state_after_mtp_verify(
        backend,
        last_correct_step_indices=torch.tensor(STEPS),
        mamba_track_indices=torch.tensor(TRACKS) if track else None,
        mamba_steps_to_track=torch.tensor(TRACK_STEPS) if track else None,
        model=None,
        req_pool_indices=None if rows is None else torch.tensor(rows),
    )


def expected(start: SimpleNamespace, rows: list[int], track: bool) -> list[torch.Tensor]:
    """[temporal, conv] after the commit; start is a copy made before it."""
    temporal, conv = start.temporal.clone(), start.conv[0].clone()
    sets = [(TRACKS, TRACK_STEPS), (SLOTS, STEPS)] if track else [(SLOTS, STEPS)]
    for dests, steps in sets:
        for dest, step, row, slot in zip(dests, steps, rows, SLOTS):
            if dest < 0 or step < 0:
                continue
            conv[:, dest] = start.intermediate_conv_window[0][:, row, step]
            if start.intermediate_ssm is not None:
                temporal[:, dest] = start.intermediate_ssm[:, row, step]
                continue
            replayed = start.temporal.clone()
            hybrid._reconstruct_ssm_from_tuples(
                replayed,
                start.intermediate_ssm_u,
                start.intermediate_ssm_k,
                start.intermediate_ssm_g,
                *(torch.tensor([x]) for x in (row, slot, step)),
            )
            temporal[:, dest] = replayed[:, slot]
    return [temporal, conv]


def copy_of(caches: SimpleNamespace) -> SimpleNamespace:
    copy = SimpleNamespace(**vars(caches))
    copy.temporal, copy.conv = caches.temporal.clone(), [t.clone() for t in caches.conv]
    return copy


def test_signature():
    parameters = inspect.signature(Backend.update_mamba_state_after_mtp_verify).parameters
    assert list(parameters) == [
        *("self", "last_correct_step_indices", "mamba_track_indices", "mamba_steps_to_track"),
        *("model", "req_pool_indices"),
    ]
    assert parameters["req_pool_indices"].default is None


def test_every_definition_accepts_the_five_keywords():
    """Catches: a backend whose hook would fail at its first verify."""
    wanted = {
        *("last_correct_step_indices", "mamba_track_indices", "mamba_steps_to_track"),
        *("model", "req_pool_indices"),
    }
    found = 0
    for path in Path(next(iter(sglang.srt.__path__))).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name == (
                "update_mamba_state_after_mtp_verify"
            ):
                found += 1
                names = {a.arg for a in (*node.args.args, *node.args.kwonlyargs)}
                assert node.args.kwarg is not None or wanted <= names, path
    assert found


@pytest.mark.parametrize("lossless", [True, False], ids=["tuples", "snapshots"])
@pytest.mark.parametrize("track", [True, False], ids=["track", "no track"])
def test_commit_on_bare_namespaces(track, lossless):
    """Catches: an attribute read beside the allowed ones; in place before track; row indices past n."""
    caches = make_caches(lossless)
    start = copy_of(caches)
    backend, calls = namespaces(caches)
    commit(backend, track=track, rows=[1, 2, 3])
    temporal, conv = expected(start, [0, 1, 2], track)
    assert torch.equal(caches.temporal, temporal) and torch.equal(caches.conv[0], conv)
    assert len(calls) == 1 and calls[0][0].tolist() == SLOTS


@pytest.mark.parametrize("lossless", [True, False], ids=["tuples", "snapshots"])
def test_stable_rows(lossless):
    """Catches: stable rows used for one of replay and scatter only; stale slots; row 0 refused."""
    caches = make_caches(lossless)
    start = copy_of(caches)
    backend, calls = namespaces(
        caches, forward_metadata=SimpleNamespace(mamba_cache_indices=torch.tensor([8]))
    )
    asked = []
    backend.linear_attn_backend.req_to_token_pool.get_mamba_indices = lambda rows: (
        asked.append(rows.tolist()) or torch.tensor(SLOTS, dtype=torch.int32)
    )
    with envs.SGLANG_ENABLE_PP_SPEC.override(True):
        commit(backend, rows=ROWS)
    temporal, conv = expected(start, ROWS, True)
    assert torch.equal(caches.temporal, temporal) and torch.equal(caches.conv[0], conv)
    assert asked == [ROWS] and calls[0][4].tolist() == ROWS


@pytest.mark.parametrize("lossless", [True, False], ids=["tuples", "snapshots"])
def test_stable_rows_need_indices(lossless):
    caches = make_caches(lossless)
    start = copy_of(caches)
    with envs.SGLANG_ENABLE_PP_SPEC.override(True):
        commit(namespaces(caches)[0])
    assert torch.equal(caches.temporal, expected(start, [0, 1, 2], True)[0])


def test_translation_of_track_slots_only():
    """Catches: physical working slots translated a second time."""
    seen = []
    caches = make_caches(True)
    backend, _ = namespaces(
        caches, _translate_mamba_indices=lambda x: (seen.append(x.tolist()), x)[1]
    )
    commit(backend)
    assert seen == [TRACKS]
    commit(backend, track=False)
    assert seen == [TRACKS]


@pytest.mark.parametrize("stable", [True, False])
def test_mocked_pool_takes_the_snapshot_path(stable):
    """Catches: a mock's attribute taken for a tuple ring; patch points that have no effect."""
    backend = object.__new__(Backend)
    backend._update_ple_state_after_mtp_verify = MagicMock()
    linear = backend.linear_attn_backend = MagicMock()
    pool = linear.req_to_token_pool
    pool.get_mamba_indices.return_value = torch.tensor([41, 42, 43])
    linear.forward_metadata.mamba_cache_indices = torch.tensor([9, 10, 11])
    linear._translate_mamba_indices.side_effect = lambda x: x + 100
    steps, rows = torch.tensor([2, 0, 3]), torch.tensor([7, 8, 9])
    with (
        patch(f"{MODULE}.scatter_mamba_states_after_mtp_verify") as scatter,
        patch(f"{MODULE}.envs.SGLANG_ENABLE_PP_SPEC.get", return_value=stable),
    ):
        backend.update_mamba_state_after_mtp_verify(
            last_correct_step_indices=steps,
            mamba_track_indices=None,
            mamba_steps_to_track=None,
            model=None,
            req_pool_indices=rows,
        )
    scatter.assert_called_once()
    args, keywords = scatter.call_args
    assert args[1].tolist() == ([141, 142, 143] if stable else [9, 10, 11])
    assert args[2] is steps
    assert not keywords.get("skip_ssm", False)
    if stable:
        assert torch.equal(keywords["src_indices_raw"], rows)
        assert torch.equal(pool.get_mamba_indices.call_args.args[0], rows)
    else:
        assert keywords["src_indices_raw"] is None
        pool.get_mamba_indices.assert_not_called()
        linear._translate_mamba_indices.assert_not_called()


def test_replacing_the_modules_environment_has_an_effect():
    backend, _ = namespaces(make_caches(False))
    asked = []
    backend.linear_attn_backend.req_to_token_pool.get_mamba_indices = lambda rows: (
        asked.append(1) or torch.tensor(SLOTS)
    )
    stand_in = SimpleNamespace(SGLANG_ENABLE_PP_SPEC=SimpleNamespace(get=lambda: True))
    with patch.object(hybrid, "envs", stand_in):
        commit(backend, rows=ROWS)
    assert asked == [1]


def test_lossless_commit_scatters_windows_only():
    backend, _ = namespaces(make_caches(True))
    with patch.object(hybrid, "scatter_mamba_states_after_mtp_verify") as scatter:
        commit(backend)
    assert scatter.call_count == 1 and scatter.call_args.kwargs["skip_ssm"] is True


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
