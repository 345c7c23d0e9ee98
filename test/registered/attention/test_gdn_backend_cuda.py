"""The GPU backend of GDN layers, end to end over a real state pool: prefill, verify, commit, decode."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang.kernels import triton_support
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend
from sglang.srt.layers.attention.linear.utils import select_linear_attn_backends
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.mem_cache.pool.mamba_pool import MambaPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.test.ci.ci_register import register_amd_ci, register_cuda_ci

register_cuda_ci(est_time=60, stage="base-b", runner_config="1-gpu-large")
register_amd_ci(est_time=60, suite="stage-b-test-1-gpu-large-amd")
register_amd_ci(est_time=60, suite="stage-b-test-1-gpu-small-amd-mi35x")

if not torch.cuda.is_available() and not triton_support.INTERPRETING:
    pytest.skip("needs a CUDA or ROCm device", allow_module_level=True)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
H, HV, DIM = (2, 4, 128) if DEVICE.type == "cuda" else (1, 2, 16)
LAYERS, DRAFTS, REQUESTS = 2, 4, 3
LENGTHS = [70, 5, 9] if DEVICE.type == "cuda" else [6, 2, 3]
SLOTS = [3, 1, 6]


class ReqPool:
    """The request pool as the backends see it: slot = SLOTS[row - 1]."""

    short_conv_pool = None
    ngram_pool = None

    def __init__(self, mamba_pool: MambaPool) -> None:
        self.mamba_pool = mamba_pool

    def mamba2_layer_cache(self, layer_id: int):
        return self.mamba_pool.mamba2_layer_cache(layer_id)

    def get_speculative_mamba2_params_all_layers(self):
        return self.mamba_pool.get_speculative_mamba2_params_all_layers()

    def translate_mamba_indices(self, indices: torch.Tensor) -> torch.Tensor:
        return indices

    def get_mamba_indices(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.tensor(SLOTS, dtype=torch.int32, device=DEVICE)[rows - 1]


class Setup:
    """One backend over its own pool; the same weights and inputs for the same seed."""

    def __init__(self, *, lossless: bool, temporal: torch.dtype = torch.float32) -> None:
        shape = Mamba2StateShape.create(
            tp_world_size=1,
            intermediate_size=HV * DIM,
            n_groups=H,
            num_heads=HV,
            head_dim=DIM,
            state_size=DIM,
            conv_kernel=4,
        )
        dtype = Mamba2StateDType(conv=DTYPE, temporal=temporal)
        self.pool = MambaPool(
            size=9,
            spec_state_size=REQUESTS + 1,
            cache_params=Mamba2CacheParams(shape=shape, dtype=dtype, layers=list(range(LAYERS))),
            mamba_layer_ids=list(range(LAYERS)),
            device=DEVICE,
            speculative_num_draft_tokens=DRAFTS,
            speculative_eagle_topk=1,
            enable_linear_lossless_verify=lossless,
        )
        linear = GDNAttnBackend(
            ReqPool(self.pool),
            device=DEVICE,
            num_verify_rows=REQUESTS + 1,
            backends=select_linear_attn_backends("triton"),
        )
        full = SimpleNamespace(init_forward_metadata=lambda fb: None)
        self.backend = HybridLinearAttnBackend(full, linear, [])
        gen = torch.Generator(DEVICE).manual_seed(11)
        self.layers = []
        for layer_id in range(LAYERS):
            layer = RadixLinearAttention(
                layer_id=layer_id,
                num_k_heads=H,
                num_v_heads=HV,
                head_k_dim=DIM,
                head_v_dim=DIM,
                conv_kernel_size=4,
                device=DEVICE,
                dtype=DTYPE,
            )
            for parameter in (layer.conv_weights, layer.A_log, layer.dt_bias):
                noise = torch.randn(parameter.shape, device=DEVICE, generator=gen) * 0.5
                parameter.copy_(noise)
            self.layers.append(layer)

    @torch.no_grad()
    def call(
        self,
        mode: ForwardMode,
        inputs: torch.Tensor,
        lengths: list[int],
        *,
        track: tuple[list[int], list[int]] | None = None,
        slots: list[int] | None = None,
    ) -> torch.Tensor:
        """inputs [layers, tokens, conv_dim + 2*HV] -> [layers, tokens, HV, DIM]."""

        def ints(values: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=DEVICE)

        starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        total = starts[-1]
        fb = ForwardBatch(
            forward_mode=mode,
            input_ids=ints([0] * total),
            positions=ints([0] * total),
            req_pool_indices=ints(list(range(1, len(lengths) + 1))),
            prefix_lens=ints([0] * len(lengths)),
            query_lens=ints(lengths),
            query_start_loc=ints(starts, torch.int32),
            out_cache_loc=ints([0] * total),
            mamba_cache_indices=ints(SLOTS if slots is None else slots, torch.int32),
            mamba_track_indices=None if track is None else ints(track[0]),
            mamba_track_rows=None if track is None else ints(track[1]),
            mamba_track_rows_cpu=None if track is None else list(track[1]),
            draft_token_num=DRAFTS,
            query_lens_cpu=lengths,
        )
        self.backend.init_forward_metadata(fb)
        outs = []
        for layer, x in zip(self.layers, inputs):
            mixed, a, b = x.split((layer.conv_dim, HV, HV), dim=-1)
            outs.append(self.backend.forward_linear(mixed, a, b, layer, fb))
        return torch.stack(outs)

    def commit(self, steps: list[int], dests: list[int], track: list[int]) -> None:
        self.backend.update_mamba_state_after_mtp_verify(
            last_correct_step_indices=torch.tensor(steps, device=DEVICE),
            mamba_track_indices=torch.tensor(dests, device=DEVICE),
            mamba_steps_to_track=torch.tensor(track, device=DEVICE),
            model=None,
        )

    def states(self) -> list[torch.Tensor]:
        cache = self.pool.mamba_cache
        return [cache.temporal.clone(), cache.conv[0].clone()]


def tokens(count: int, seed: int) -> torch.Tensor:
    gen = torch.Generator(DEVICE).manual_seed(seed)
    width = (2 * H + HV) * DIM + 2 * HV
    return torch.randn(LAYERS, count, width, device=DEVICE, generator=gen).to(DTYPE)


def interleave(blocks: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(blocks, dim=1)


@pytest.mark.parametrize("temporal", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_lossless_mode_equals_snapshots_over_several_turns(temporal):
    """Catches: a ring or slot mix-up, a commit that differs between the modes, a lost boundary state."""
    runs = []
    for lossless in (True, False):
        setup = Setup(lossless=lossless, temporal=temporal)
        outs = [setup.call(ForwardMode.EXTEND, tokens(sum(LENGTHS), 1), LENGTHS)]
        pools = [setup.states()]
        accepted = [[3, 0, -1], [1, 3, 2], [0, 2, 3]]
        boundaries = [[2, -1, -1], [-1, 0, 2], [-1, -1, 1]]
        for turn, (steps, track) in enumerate(zip(accepted, boundaries)):
            x = tokens(REQUESTS * DRAFTS, 100 + turn)
            before = setup.states()
            outs.append(setup.call(ForwardMode.TARGET_VERIFY, x, [DRAFTS] * REQUESTS))
            assert all(torch.equal(p, q) for p, q in zip(before, setup.states()))
            setup.commit(steps, [7, 8, 9], track)
            pools.append(setup.states())
        outs.append(setup.call(ForwardMode.DECODE, tokens(REQUESTS, 300), [1] * REQUESTS))
        pools.append(setup.states())
        runs.append((outs, pools))
    for one, other in zip(runs[0][0], runs[1][0]):
        assert torch.equal(one, other) and not one.isnan().any()
    for one, other in zip(runs[0][1], runs[1][1]):
        assert all(torch.equal(p, q) for p, q in zip(one, other))
    assert not torch.equal(runs[0][1][1][0], runs[0][1][2][0])


def test_state_after_speculation_is_that_of_a_prefill():
    """Catches: a rejected draft left in state or window, a boundary state of the wrong length."""
    setup = Setup(lossless=True)
    prompt = tokens(sum(LENGTHS), 1)
    setup.call(ForwardMode.EXTEND, prompt, LENGTHS)
    drafts = tokens(REQUESTS * DRAFTS, 2)
    setup.call(ForwardMode.TARGET_VERIFY, drafts, [DRAFTS] * REQUESTS)
    steps, track = [2, 0, 3], [1, -1, 3]
    setup.commit(steps, [7, 8, 9], track)
    got = setup.states()
    starts = [sum(LENGTHS[:i]) for i in range(REQUESTS)]
    blocks, lengths, cuts = [], [], []
    for i in range(REQUESTS):
        blocks.append(prompt[:, starts[i] : starts[i] + LENGTHS[i]])
        blocks.append(drafts[:, i * DRAFTS : i * DRAFTS + steps[i] + 1])
        lengths.append(LENGTHS[i] + steps[i] + 1)
        cuts.append(LENGTHS[i] + track[i] + 1 if track[i] >= 0 else -1)
    fresh = Setup(lossless=True)
    dests = [7 if cuts[0] > 0 else -1, -1, 9]
    fresh.call(ForwardMode.EXTEND, interleave(blocks), lengths, track=(dests, cuts))
    want = fresh.states()
    slots = [*SLOTS, 7, 9]
    assert torch.equal(got[1][:, slots], want[1][:, slots])
    scale = want[0][:, slots].abs().max()
    assert (got[0][:, slots] - want[0][:, slots]).abs().max() < 2e-2 * scale


def test_decode_tracks_and_padding_rows_change_nothing():
    """Catches: a boundary copy for an unmasked row, a padded row that writes a slot."""
    setup = Setup(lossless=True)
    setup.call(ForwardMode.EXTEND, tokens(sum(LENGTHS), 1), LENGTHS)
    before = setup.states()
    x = tokens(REQUESTS, 4)
    setup.call(
        ForwardMode.DECODE,
        x,
        [1] * REQUESTS,
        track=([7, -1, 9], [1, -1, -1]),
        slots=[SLOTS[0], -1, SLOTS[2]],
    )
    after = setup.states()
    for then, now in zip(before, after):
        assert torch.equal(now[:, 7], now[:, SLOTS[0]])
        assert not torch.equal(now[:, SLOTS[0]], then[:, SLOTS[0]])
        assert torch.equal(now[:, [0, 1, 2, 4, 5, 8, 9]], then[:, [0, 1, 2, 4, 5, 8, 9]])


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
