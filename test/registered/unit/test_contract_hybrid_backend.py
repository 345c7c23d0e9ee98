"""The rest of `HybridLinearAttnBackend`, as outside callers use it: built of mocks, on namespaces."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from sglang.srt.environ import envs
from sglang.srt.layers.attention import hybrid_linear_attn_backend as hybrid
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="unit")

Backend = hybrid.HybridLinearAttnBackend
S, R, D = 9, 6, 4


def test_names_at_the_top_of_the_module():
    tree = ast.parse(Path(hybrid.__file__).read_text(encoding="utf-8"))
    names = {a.name for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert names >= {
        *("envs", "scatter_mamba_states_after_mtp_verify"),
        *("fused_mamba_state_scatter_with_mask", "fused_conv_window_scatter_with_mask"),
    }


def test_children_are_prepared_once():
    """Catches: a child prepared twice or not at all; the linear child not skipped for draft extends."""
    full, linear, fb = MagicMock(), MagicMock(), MagicMock()
    backend = Backend(full, linear, [3, 7])
    assert backend.full_attn_backend is full and backend.linear_attn_backend is linear
    assert backend.full_attn_layers == [3, 7]
    fb.forward_mode.is_draft_extend_v2.return_value = False
    backend.init_forward_metadata(fb)
    fb.forward_mode.is_draft_extend_v2.return_value = True
    backend.init_forward_metadata(fb)
    assert full.init_forward_metadata.call_count == 2
    linear.init_forward_metadata.assert_called_once_with(fb)
    for capture in (False, True):
        full.reset_mock(), linear.reset_mock()
        backend.init_forward_metadata_out_graph(fb, in_capture=capture)
        for child in (full, linear):
            child.init_forward_metadata_out_graph.assert_called_once_with(fb, in_capture=capture)
    full.reset_mock()
    backend.init_forward_metadata_out_graph(fb)
    full.init_forward_metadata_out_graph.assert_called_once_with(fb, in_capture=False)


def test_static_scatter_on_cpu():
    dst, src = torch.zeros(1, 8, 2), torch.zeros(1, 16, 4, 2)
    src[0, 11, 2] = torch.tensor([3.0, 7.0])
    index = [torch.tensor([5, 6, 8]), torch.tensor([2, 4, 2]), torch.tensor([11, 11, 11])]
    Backend._scatter_speculative_state_with_mask(dst, src, *index)
    assert dst[0, 5].tolist() == [3.0, 7.0] and dst.abs().sum() == 10


def test_side_state_follows_both_sets():
    """Catches: side state committed without its boundary copy, or with batch rows for stable rows."""
    side = SimpleNamespace(conv_state=torch.zeros(1, S, 2), intermediate_conv_state=None)
    side.intermediate_conv_state = torch.randn(1, R, D, 2)
    pool = SimpleNamespace(short_conv_pool=side, ngram_pool=SimpleNamespace(context=None))
    backend = object.__new__(Backend)
    backend.linear_attn_backend = SimpleNamespace(req_to_token_pool=pool)
    index = [torch.tensor(x) for x in ([3], [2], [7], [1])]
    backend._update_ple_state_after_mtp_verify(*index, src_indices_raw=torch.tensor([4]))
    source = side.intermediate_conv_state[0, 4]
    assert torch.equal(side.conv_state[0, 3], source[2])
    assert torch.equal(side.conv_state[0, 7], source[1])
    assert side.conv_state.ne(0).sum() == 4


def test_replay_metadata():
    """Catches: padded rows that keep a slot; track destinations shorter than the batch."""
    base = hybrid.MambaAttnBackendBase
    backend = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(get_mamba_indices=lambda rows: rows * 10),
        _translate_mamba_indices=lambda x: x + 1,
    )
    metadata = base._replay_metadata(
        backend,
        4,
        torch.tensor([3, 1, 0, 0]),
        None,
        None,
        None,
        num_padding=2,
        in_capture=False,
        mamba_track_indices=torch.tensor([5, 6]),
    )
    assert metadata.mamba_cache_indices.tolist() == [31, 11, -1, -1]
    assert metadata.mamba_track_indices.shape == (4,)
    assert metadata.mamba_track_indices.tolist()[:2] == [5, 6]
    with envs.SGLANG_VALIDATE_MAMBA_REPLAY_STATE_INDICES.override(True):
        base._replay_metadata(backend, 2, torch.tensor([3, 1]), None, None, None)
        for wrong in ([3, 3], [3, -1]):
            with pytest.raises(ValueError, match="slot of its own"):
                base._replay_metadata(backend, 2, torch.tensor(wrong), None, None, None)
    names = list(inspect.signature(base._replay_metadata).parameters)
    assert names[1:] == [
        *("bs", "req_pool_indices", "forward_mode", "spec_info", "seq_lens_cpu"),
        *("num_padding", "in_capture", "mamba_track_indices"),
    ]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
