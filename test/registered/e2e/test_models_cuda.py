"""Every architecture on a GPU against an independent model: prompts in chunks, decode, verify rows.

bf16 checkpoints against `transformers` in fp32, FP8 ones against the CPU's module path with activations
rounded as the kernels round them. Both take the GPU's choices of experts and say how good those are.
"""

from __future__ import annotations

import pytest
import torch

from sglang.kernels.ops.cpu import library
from sglang.srt.layers.fp8_linear import FP8Linear
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.test.ci.ci_register import register_cuda_ci
from sglang.test.make_checkpoint import make_checkpoint
from sglang.test.model_reference import (
    RouteLog,
    Routes,
    map_errors,
    quantized_logits,
    relative_error,
    transformers_logits,
)
from sglang.test.model_rig import ModelRig, random_tokens

register_cuda_ci(est_time=150, stage="base-b", runner_config="1-gpu-large")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

ARCHITECTURES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
DRAFTS = 4
LENGTH, CUT, STEPS = 150, 97, 12
# Of the logits' norm. bf16: eight bits at some twenty roundings in a row. FP8: one bf16 bit decides which
# of two e4m3 values, an eighth apart, an activation becomes, so equal formulas end up 0.075 apart after
# four layers; what each map computes is held to MAP_ERROR by itself.
RELATIVE_ERROR = {"bf16": 0.05, "fp8": 0.12}
MAP_ERROR = 0.015
"""The bf16 rounding of a result is 0.0017; two maps in a row with an e4m3 rounding between them make 0.0065
of differences of 1e-4 in the first one's sums, which are the tensor cores'."""
REGRET = 0.15
"""Share of probability that a router may miss; bf16 noise alone explains 0.04."""
DTYPES = pytest.mark.parametrize("dtype", list(RELATIVE_ERROR))
BOTH_SCRATCHES = pytest.mark.parametrize("lossless", [False, True], ids=["snapshots", "tuples"])


@pytest.fixture(autouse=True)
def restore_kernels():
    yield
    library.select("auto")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[tuple[str, str], str]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        (arch, dtype): str(
            make_checkpoint(root / f"{arch}-{dtype}", arch=arch, dtype=dtype, seed=1)
        )
        for arch in ARCHITECTURES
        for dtype in RELATIVE_ERROR
    }


def tokens_of_prompt() -> list[int]:
    return torch.randint(0, 4000, (LENGTH,), generator=torch.Generator().manual_seed(3)).tolist()


def reference(path: str, dtype: str, tokens: list[int], routes: Routes) -> torch.Tensor:
    """Logits [T, vocab] fp32 with the given choices of experts, which must be nearly the best."""
    if dtype == "bf16":
        pytest.importorskip("transformers")
    answer = transformers_logits if dtype == "bf16" else quantized_logits
    logits, regret = answer(path, tokens, routes)
    print(f"routers: {regret.changed} of {regret.rows} other choices, worst {regret.worst:.4f}")
    assert regret.worst < REGRET
    return logits


def gpu_rig(path: str, **options) -> ModelRig:
    common = {"dtype": torch.bfloat16, "conv_dtype": "bfloat16", "device": "cuda"}
    return ModelRig(path, kernels="torch", **common, **options)


@DTYPES
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_prefill_and_decode(arch, dtype, checkpoints):
    """Any wrong formula, weight cut, scale or hand-over between chunks and steps."""
    path, tokens = checkpoints[arch, dtype], tokens_of_prompt()
    rig = gpu_rig(path)
    kinds = {type(module) for module in rig.model.modules()}
    assert (FP8Linear in kinds) == (dtype == "fp8")
    start = LENGTH - STEPS
    with RouteLog(rig) as routes:
        parts = [
            rig.run(ForwardMode.EXTEND, [tokens[:CUT]], [0]).logits,
            rig.run(ForwardMode.EXTEND, [tokens[CUT:start]], [CUT]).logits,
        ]
        for i in range(start, LENGTH):
            parts.append(rig.run(ForwardMode.DECODE, [[tokens[i]]], [i]).logits)
    got = torch.cat(parts)
    want = reference(path, dtype, tokens, routes.take([slice(None)] * len(parts)))
    found = [relative_error(got[own], want[own]) for own in (slice(start), slice(start, None))]
    print(f"{arch} {dtype}: prefill {found[0]:.4f} decode {found[1]:.4f}")
    assert max(found) < RELATIVE_ERROR[dtype]
    assert relative_error(got[1:], want[:-1]) > 0.3, "the measure must see a difference"


@pytest.mark.parametrize("num_rows", [1, 4, LENGTH])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_fp8_map_by_itself(arch, num_rows, checkpoints):
    """A scale of the wrong block, a weight's part in the wrong place, a lost expert."""
    path = checkpoints[arch, "fp8"]
    rig, plain = gpu_rig(path), ModelRig(path, kernels="torch")
    errors = map_errors(rig, plain.model, num_rows=num_rows)
    worst = max(errors, key=errors.__getitem__)
    print(f"{arch}, {num_rows} rows: worst of {len(errors)} maps {errors[worst]:.5f} ({worst})")
    assert errors[worst] < MAP_ERROR, worst
    assert len(errors) >= 3 * len(plain.model.layers)
    name = "layers.0.mixer.out_proj"
    plain.model.get_submodule(name).weight[:128, :128] *= 1.25
    found = map_errors(rig, plain.model, num_rows=num_rows)[name]
    assert found > 2 * MAP_ERROR, "the measure must see one block's scale"


@BOTH_SCRATCHES
@DTYPES
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_verify_rows_and_what_they_leave(arch, dtype, lossless, checkpoints):
    """Verify rows beside other requests, then the accepted part alone, must be the plain sequence."""
    path, tokens = checkpoints[arch, dtype], tokens_of_prompt()
    rig = gpu_rig(path, num_draft=DRAFTS, lossless=lossless)
    start = LENGTH - 3 * DRAFTS
    other = random_tokens(rig.config, start, seed=9)
    taken = [slice(70, None)]
    at, found = start, []
    with RouteLog(rig) as routes:
        rig.run(ForwardMode.EXTEND, [other[:70], tokens[:start]], [0, 0], requests=[1, 2])
        for accepted in (1, 3, 0):
            wrong = [(token + 1) % 4000 for token in tokens[at + accepted + 1 : at + DRAFTS]]
            row = tokens[at : at + accepted + 1] + wrong
            blocks, lens = [other[70 : 70 + DRAFTS], row], [70, at]
            options = {"requests": [1, 2]}
            logits = rig.run(ForwardMode.TARGET_VERIFY, blocks, lens, **options).logits
            taken.append(slice(DRAFTS, DRAFTS + accepted + 1))
            found.append((at, logits[taken[-1]].clone()))
            rig.commit([-1, accepted])
            at += accepted + 1
    want = reference(path, dtype, tokens[:at], routes.take(taken))
    for at, own in found:
        error = relative_error(own, want[at : at + len(own)])
        print(f"{arch} {dtype}: verify at {at} {error:.4f}")
        assert error < RELATIVE_ERROR[dtype]


@DTYPES
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_equal_calls_give_equal_bits(arch, dtype, checkpoints):
    """A race or an uninitialised read: two rigs over poisoned memory must agree in every bit."""
    path, tokens = checkpoints[arch, dtype], tokens_of_prompt()
    outs = []
    for fill in (float("nan"), 1.0):
        poison = torch.full((1 << 26,), fill, device="cuda")
        del poison
        rig = gpu_rig(path)
        prompt = rig.run(ForwardMode.EXTEND, [tokens[:CUT]], [0]).logits
        step = rig.run(ForwardMode.DECODE, [[tokens[CUT]]], [CUT]).logits
        outs.append((prompt, step, *rig.states(1)))
        del rig
    for name, one, two in zip(("prefill", "decode", "conv", "temporal"), *outs, strict=True):
        assert torch.equal(one, two), name


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
