"""Every architecture on a GPU against an independent model: prompts in chunks, decode, verify rows.

bf16 checkpoints against `transformers` in fp32; FP8 ones against the CPU engine on dequantised weights,
which other tests compare with `transformers`.
"""

from __future__ import annotations

import pytest
import torch

from sglang.kernels.ops.cpu import library
from sglang.srt.layers.fp8_linear import FP8Linear
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.test.ci.ci_register import register_cuda_ci
from sglang.test.make_checkpoint import make_checkpoint
from sglang.test.model_rig import ModelRig, random_tokens

register_cuda_ci(est_time=150, stage="base-b", runner_config="1-gpu-large")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

ARCHITECTURES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
DRAFTS = 4
LENGTH, CUT, STEPS = 150, 97, 12
# Of the logits' norm. bf16: eight bits at some twenty roundings in a row. FP8: activations keep three bits
# of mantissa at every linear map (0.07 in the interpreter).
RELATIVE_ERROR = {"bf16": 0.05, "fp8": 0.12}
DTYPES = pytest.mark.parametrize("dtype", list(RELATIVE_ERROR))
BOTH_SCRATCHES = pytest.mark.parametrize("lossless", [False, True], ids=["snapshots", "tuples"])


@pytest.fixture(autouse=True)
def restore_kernels():
    yield
    library.select("auto")


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """(path, tokens, logits [T, vocab] fp32) by architecture and dtype; made when first asked for."""
    root, made = tmp_path_factory.mktemp("checkpoints"), {}

    def case(arch: str, dtype: str):
        if (arch, dtype) not in made:
            path = str(make_checkpoint(root / f"{arch}-{dtype}", arch=arch, dtype=dtype, seed=1))
            tokens = torch.randint(0, 4000, (LENGTH,), generator=torch.Generator().manual_seed(3))
            reference = _transformers if dtype == "bf16" else _cpu_engine
            made[arch, dtype] = (path, tokens.tolist(), reference(path, tokens))
        return made[arch, dtype]

    return case


def _transformers(path: str, tokens: torch.Tensor) -> torch.Tensor:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        return model.eval()(tokens[None]).logits[0]


def _cpu_engine(path: str, tokens: torch.Tensor) -> torch.Tensor:
    return ModelRig(path, kernels="torch").run(ForwardMode.EXTEND, [tokens.tolist()], [0]).logits


def gpu_rig(path: str, **options) -> ModelRig:
    common = {"dtype": torch.bfloat16, "conv_dtype": "bfloat16", "device": "cuda"}
    return ModelRig(path, kernels="torch", **common, **options)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.cpu() - want).norm() / want.norm()).item()


@DTYPES
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_prefill_and_decode(arch, dtype, cases):
    """Any wrong formula, weight cut, scale or hand-over between chunks and steps."""
    path, tokens, want = cases(arch, dtype)
    rig = gpu_rig(path)
    kinds = {type(module) for module in rig.model.modules()}
    assert (FP8Linear in kinds) == (dtype == "fp8")
    first = rig.run(ForwardMode.EXTEND, [tokens[:CUT]], [0]).logits
    start = LENGTH - STEPS
    second = rig.run(ForwardMode.EXTEND, [tokens[CUT:start]], [CUT]).logits
    prompt = torch.cat([first, second])
    steps = [
        rig.run(ForwardMode.DECODE, [[tokens[i]]], [i]).logits[0] for i in range(start, LENGTH)
    ]
    found = error(prompt, want[:start]), error(torch.stack(steps), want[start:])
    print(f"{arch} {dtype}: prefill {found[0]:.4f} decode {found[1]:.4f}")
    assert max(found) < RELATIVE_ERROR[dtype]
    assert error(prompt[1:], want[: start - 1]) > 0.3, "the measure must see a difference"


@BOTH_SCRATCHES
@DTYPES
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_verify_rows_and_what_they_leave(arch, dtype, lossless, cases):
    """Verify rows beside other requests, then the accepted part alone, must be the plain sequence."""
    path, tokens, want = cases(arch, dtype)
    rig = gpu_rig(path, num_draft=DRAFTS, lossless=lossless)
    start = LENGTH - 3 * DRAFTS
    other = random_tokens(rig.config, start, seed=9)
    rig.run(ForwardMode.EXTEND, [other[:70], tokens[:start]], [0, 0], requests=[1, 2])
    at = start
    for accepted in (1, 3, 0):
        wrong = [(token + 1) % 4000 for token in tokens[at + accepted + 1 : at + DRAFTS]]
        row = tokens[at : at + accepted + 1] + wrong
        blocks, lens = [other[70 : 70 + DRAFTS], row], [70, at]
        options = {"requests": [1, 2]}
        logits = rig.run(ForwardMode.TARGET_VERIFY, blocks, lens, **options).logits
        own = logits[DRAFTS : DRAFTS + accepted + 1]
        found = error(own, want[at : at + accepted + 1])
        print(f"{arch} {dtype}: verify at {at} {found:.4f}")
        assert found < RELATIVE_ERROR[dtype]
        rig.commit([-1, accepted])
        at += accepted + 1


@DTYPES
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_equal_calls_give_equal_bits(arch, dtype, cases):
    """A race or an uninitialised read: two rigs over poisoned memory must agree in every bit."""
    path, tokens, _ = cases(arch, dtype)
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
