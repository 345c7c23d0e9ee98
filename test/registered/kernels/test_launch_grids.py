"""F119: no launch of a whole model, on the largest batches, leaves the limits of a CUDA grid.

The models run on torch's "meta" device, which has shapes and no memory, and launches are recorded instead
of made. So the published geometries run here at sizes that no GPU of one node can hold.
"""

from __future__ import annotations

import pytest
import torch

from sglang.srt.configs.mamba_utils import mamba_cache_params
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
from sglang.srt.layers.attention.linear.utils import select_linear_attn_backends
from sglang.srt.mem_cache.pool import HybridReqToTokenPool, MHATokenToKVPool
from sglang.srt.model_executor.backends import build_attention_backend
from sglang.srt.model_executor.batch_tensors import make_forward_batch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models.registry import build_model
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.repo import ROOT

register_cpu_ci(est_time=20, suite="kernels")

pytest.importorskip("triton", reason="Triton is not installed")

META = torch.device("meta")
MODELS = ("Qwen3.6-35B-A3B-FP8", "Qwen3.8-27B-FP8", "Qwen3-Next-80B-A3B", "Qwen3.5-0.8B")
LIMITS = (2**31 - 1, 65535, 65535)
CONTEXT = 262_144
REQUESTS = 12_000
"""More than 141 GB hold of any published geometry: its smallest state slot has 19 MB."""
DRAFTS = 8
Grid = tuple[int, ...]


@pytest.fixture
def launches(monkeypatch) -> list[tuple[str, Grid]]:
    """(kernel, grid) of every launch; nothing is launched."""
    from triton.runtime.jit import JITFunction

    seen: list[tuple[str, Grid]] = []

    def run(self, *args, grid, warmup, **options):
        seen.append((self.fn.__name__, tuple(int(axis) for axis in grid)))

    monkeypatch.setattr(JITFunction, "run", run)
    return seen


class MetaModel:
    """A published model over pools of the largest sizes, without memory."""

    def __init__(self, name: str) -> None:
        from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend

        folder = ROOT / "test" / "registered" / "unit" / "model_configs"
        config = ModelConfig.from_path(str(folder / f"{name}.json"))
        self.req_pool = HybridReqToTokenPool(
            size=REQUESTS,
            mamba_size=REQUESTS,
            mamba_spec_state_size=REQUESTS,
            max_context_len=CONTEXT,
            device=META,
            enable_memory_saver=False,
            cache_params=mamba_cache_params(config),
            mamba_layer_ids=list(config.linear_layer_ids),
            enable_mamba_extra_buffer=False,
            speculative_num_draft_tokens=DRAFTS,
            speculative_eagle_topk=1,
            enable_linear_lossless_verify=True,
        )
        layers = list(config.full_attention_layer_ids)
        kv_pool = MHATokenToKVPool(
            1 << 24,
            64,
            torch.bfloat16,
            config.num_key_value_heads,
            config.head_dim,
            len(layers),
            META,
        )
        attention = build_attention_backend(
            self.req_pool,
            kv_pool,
            device=META,
            max_step_rows=REQUESTS * DRAFTS,
            num_heads=config.num_attention_heads,
            head_dim=config.head_dim,
        )
        linear = GDNAttnBackend(
            self.req_pool,
            device=META,
            num_verify_rows=REQUESTS,
            backends=select_linear_attn_backends("triton"),
        )
        self.backend = HybridLinearAttnBackend(attention, linear, layers)
        options = {"device": META, "dtype": torch.bfloat16, "batch_invariant": False}
        self.model = build_model(config, attn_backend=self.backend, **options)

    def run(self, mode: ForwardMode, prefix: int, lengths: list[int]) -> None:
        rows = list(range(1, len(lengths) + 1))
        fb = make_forward_batch(
            mode,
            req_pool=self.req_pool,
            rows=rows,
            prefix_lens=[prefix] * len(rows),
            query_lens=lengths,
            input_ids=torch.zeros(sum(lengths), dtype=torch.int64, device=META),
        )
        self.backend.init_forward_metadata(fb)
        self.model.forward(fb)

    def commit(self) -> None:
        rows = torch.zeros(REQUESTS, dtype=torch.int64, device=META)
        self.backend.update_mamba_state_after_mtp_verify(
            last_correct_step_indices=rows,
            mamba_track_indices=rows,
            mamba_steps_to_track=rows,
            model=self.model,
            req_pool_indices=rows,
        )


def check(launches: list[tuple[str, Grid]], *, at_least: int) -> Grid:
    """Largest extent of each axis; fails for a grid outside the limits, or for too few launches."""
    assert len(launches) >= at_least
    for name, grid in launches:
        fits = all(1 <= axis <= limit for axis, limit in zip(grid, LIMITS))
        assert fits, f"{name} is launched over {grid}; the limits are {LIMITS}"
    largest = tuple(max((g[i] for _, g in launches if i < len(g)), default=1) for i in range(3))
    launches.clear()
    return largest


@pytest.mark.parametrize("name", MODELS)
def test_grids_of_the_largest_batches(name, launches):
    """Requests, tokens or heads on an axis that ends at 65,535."""
    model = MetaModel(name)
    layers = len(model.model.layers)
    model.run(ForwardMode.EXTEND, 0, [CONTEXT])
    long = check(launches, at_least=layers)
    model.run(ForwardMode.EXTEND, 64, [20] * REQUESTS)
    many = check(launches, at_least=layers)
    model.run(ForwardMode.DECODE, CONTEXT - 9, [1] * REQUESTS)
    decode = check(launches, at_least=layers)
    model.run(ForwardMode.TARGET_VERIFY, CONTEXT - 9, [DRAFTS] * REQUESTS)
    verify = check(launches, at_least=layers)
    model.commit()
    commit = check(launches, at_least=1)
    print(
        f"{name}: one prompt {long}, many prompts {many}, decode {decode}, "
        f"verify {verify}, commit {commit}"
    )


def test_a_grid_outside_is_seen(launches):
    """The control: far more requests than any server has do leave the limits."""
    launches.append(("kernel", (4, 70_000)))
    with pytest.raises(AssertionError, match="launched over"):
        check(launches, at_least=1)
    with pytest.raises(AssertionError):
        check([], at_least=1)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
