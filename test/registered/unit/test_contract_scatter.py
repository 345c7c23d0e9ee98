"""Snapshot and window scatter, track copies, and commit steps, as callers outside use them (CPU tensors)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang.kernels.ops.mamba.mamba_state_scatter_triton import (
    fused_commit_track_indices,
    fused_conv_window_scatter_multi,
    fused_conv_window_scatter_with_mask,
    fused_mamba_state_scatter_with_mask,
    scatter_mamba_states_after_mtp_verify,
    track_mamba_states_all_layers,
    track_mamba_states_if_needed,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit")

L, S, R, D = 2, 7, 5, 3
INT = (torch.int32, torch.int64, torch.int16)
BOTH = (fused_mamba_state_scatter_with_mask, fused_conv_window_scatter_with_mask)


def overlapping(dim: int = 4, width: int = 3) -> torch.Tensor:
    """[L, R, D, dim, width] windows that share columns."""
    physical = torch.randn(L, R, dim, D + width - 1)
    strides = physical.stride()
    return physical.as_strided((L, R, D, dim, width), (*strides[:2], strides[3], *strides[2:]))


def expected(dst, src, dests, steps, rows):
    want = dst.clone()
    for r, (dest, step) in enumerate(zip(dests, steps)):
        row = r if rows is None else rows[r]
        if 0 <= step < D and 0 <= dest < S and 0 <= row < R:
            want[:, dest] = src[:, row, step]
    return want


@pytest.mark.parametrize("entry", [(6,), (4, 3), (2, 4, 3)], ids=str)
@pytest.mark.parametrize("dtype", INT, ids=str)
@pytest.mark.parametrize("scatter", BOTH)
def test_rows_are_copied_or_skipped(scatter, dtype, entry):
    """Catches: a step at or past D clamped, a slot or row past the end wrapped, -1 taken from the end."""
    torch.manual_seed(0)
    src = torch.randn(L, R, D, *entry)
    dests = [3, 1, 0, S, -1, 2, 5, 6, 4]
    steps = [2, -1, D - 1, 0, 0, D, 0, 1, 1]
    rows = [4, 0, 2, 1, 1, 1, R, -1, 0]
    dst = torch.randn(L, S, *entry)
    want = expected(dst, src, dests, steps, rows)
    index = [torch.tensor(x, dtype=dtype) for x in (dests, steps, rows)]
    assert scatter(dst, src, *index) is None
    assert torch.equal(dst, want)
    # Without rows, request r reads row r, and rows past the scratch are skipped.
    want = expected(dst, src, dests, steps, None)
    scatter(dst, src, *index[:2])
    assert torch.equal(dst, want)


def test_windows_may_overlap_and_pools_may_be_strided():
    """Catches: a dst taken for dense; overlapping windows read at the wrong step."""
    torch.manual_seed(1)
    src = overlapping()
    envelope = torch.randn(L, S, 20)
    before = envelope.clone()
    dst = envelope[:, :, 5:17].unflatten(-1, (4, 3))
    assert not dst.is_contiguous()
    want = expected(dst, src, [6, 0], [1, 2], None)
    fused_conv_window_scatter_with_mask(dst, src, torch.tensor([6, 0]), torch.tensor([1, 2]))
    assert torch.equal(dst, want)
    assert torch.equal(envelope[:, :, :5], before[:, :, :5])
    assert torch.equal(envelope[:, :, 17:], before[:, :, 17:])
    with pytest.raises(ValueError, match="contiguous"):
        fused_mamba_state_scatter_with_mask(dst, src, torch.tensor([6]), torch.tensor([1]))


@pytest.mark.parametrize("scatter", BOTH)
def test_bad_arguments_are_value_errors(scatter):
    """Catches: broadcasting of a wrong rank, layer count, entry, index length or index rank."""
    dst, src = torch.zeros(L, S, 4, 3), torch.zeros(L, R, D, 4, 3)
    one = torch.tensor([1])
    bad = (
        (dst[0], src, one, one),
        (dst, src[:, :, 0], one, one),
        (dst, src[:1], one, one),
        (dst, torch.zeros(L, R, D, 3, 4), one, one),
        (dst, src, one[None], one),
        (dst, src, one, torch.tensor([1, 2])),
        (dst, src, one, one, torch.tensor([1, 2])),
        (torch.zeros(L, S, 3, 4).transpose(2, 3), src, one, one),
        (dst, src.to("meta"), one, one),
    )
    for arguments in bad:
        with pytest.raises(ValueError):
            scatter(*arguments)
    scatter(dst, src, one[:0], one[:0])
    assert dst.eq(0).all()


def test_multi_scatters_accept_and_track_sets():
    """Catches: the second set dropped, or its rule different from the first's."""
    torch.manual_seed(2)
    pairs = [(torch.randn(L, S, 4, 3).bfloat16(), overlapping().bfloat16()) for _ in range(2)]
    wants = []
    for dst, src in pairs:
        want = expected(dst, src, [5, -1, 2], [0, 1, D], None)
        wants.append(expected(want, src, [1, 2, 3], [1, -1, 2], None))
    index = [torch.tensor(x) for x in ([5, -1, 2], [0, 1, D], [1, 2, 3], [1, -1, 2])]
    fused_conv_window_scatter_multi(pairs, *index)
    assert all(torch.equal(dst, want) for (dst, _), want in zip(pairs, wants))
    before = [dst.clone() for dst, _ in pairs]
    fused_conv_window_scatter_multi(pairs, *(x[:0] for x in index[:2]))
    assert all(torch.equal(dst, b) for (dst, _), b in zip(pairs, before))


def caches() -> SimpleNamespace:
    torch.manual_seed(4)
    return SimpleNamespace(
        conv=[torch.randn(L, S, 4, 3), torch.randn(L, S, 2, 3)],
        temporal=torch.randn(L, S, 2, 3, 4),
        intermediate_ssm=torch.randn(L, R, D, 2, 3, 4),
        intermediate_conv_window=[overlapping(), overlapping(dim=2)],
    )


@pytest.mark.parametrize("skip_ssm", [False, True])
@pytest.mark.parametrize("rows", [None, [3, 0, 4]], ids=["batch rows", "given rows"])
def test_commit_of_accept_and_track_sets(rows, skip_ssm):
    """Catches: skip_ssm that skips windows too, or only one of the two sets."""
    c = caches()
    sets = (([5, 1, -1], [2, -1, 0]), ([6, 2, 0], [1, 0, -1]))
    pairs = [(c.temporal, c.intermediate_ssm), *zip(c.conv, c.intermediate_conv_window)]
    wants = []
    for dst, src in pairs:
        want = dst
        for dests, steps in sets:
            want = expected(want, src, dests, steps, rows)
        wants.append(want)
    if skip_ssm:
        wants[0], c.intermediate_ssm = c.temporal.clone(), None
    (slots, steps), (dests, track) = ([torch.tensor(x) for x in pair] for pair in sets)
    scatter_mamba_states_after_mtp_verify(
        c,
        slots,
        steps,
        dests,
        track,
        src_indices_raw=None if rows is None else torch.tensor(rows),
        skip_ssm=skip_ssm,
    )
    assert all(torch.equal(dst, want) for (dst, _), want in zip(pairs, wants))


def test_commit_without_track_set():
    c = caches()
    want = expected(c.temporal, c.intermediate_ssm, [3], [0], None)
    scatter_mamba_states_after_mtp_verify(c, torch.tensor([3]), torch.tensor([0]), None, None)
    assert torch.equal(c.temporal, want)


def test_commit_steps_of_chain_and_tree():
    """Catches: the bonus token not counted, a row offset kept, a track step past the accepted one."""
    accept_index = torch.tensor([[0, 1, 2, 3, -1], [5, 6, 7, -1, -1], [10, 12, 14, -1, -1]])
    lens = torch.tensor([4, 3, 3], dtype=torch.int32)
    last, track = fused_commit_track_indices(accept_index.int(), lens, None, 5, 256)
    assert last.tolist() == [3, 2, 4] and track is None
    seq_lens = torch.tensor([253, 128, 254])
    last, track = fused_commit_track_indices(accept_index, lens, seq_lens, 5, 256)
    assert last.tolist() == [3, 2, 4]
    assert track.tolist() == [2, -1, 2]
    assert last.dtype is track.dtype is torch.int64
    assert fused_commit_track_indices(accept_index, lens, None, 5, 0)[1] is None
    # Boundary arithmetic of a chain against the definition, for every length and acceptance.
    for pre in range(6, 11):
        for accepted in range(1, 5):
            index = torch.arange(4)[None]
            _, track = fused_commit_track_indices(
                index, torch.tensor([accepted]), torch.tensor([pre]), 4, 4
            )
            post = pre + accepted
            want = post // 4 * 4 - pre - 1 if pre // 4 != post // 4 else -1
            assert track.item() == want and want <= accepted - 1
    none, _ = fused_commit_track_indices(index, torch.tensor([0]), None, 4, 4)
    assert none.item() == -1


@pytest.mark.parametrize("layers", [True, False], ids=["all layers", "one layer"])
def test_track_copies(layers):
    """Catches: an unmasked copy; a freed request (destination -1) copied to the last slot."""
    torch.manual_seed(5)
    conv, ssm = torch.randn(L, S, 4, 3), torch.randn(L, S, 2, 3, 4)
    want_conv, want_ssm = conv.clone(), ssm.clone()
    for want in (want_conv, want_ssm):
        want[:, 4] = want[:, 1]
    index = (
        torch.tensor([1, 2, 3, 5], dtype=torch.int32),
        torch.tensor([True, False, True, True]),
        torch.tensor([4, 6, -1, 6]),
        3,
    )
    if layers:
        track_mamba_states_all_layers(conv, ssm, *index, check_freed_slots=True)
    else:
        for layer in range(L):
            track_mamba_states_if_needed(conv[layer], ssm[layer], *index, True)
    assert torch.equal(conv, want_conv) and torch.equal(ssm, want_ssm)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
