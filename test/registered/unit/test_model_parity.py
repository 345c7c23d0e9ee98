"""Logits against `transformers` on random checkpoints, and equalities between kinds of call."""

from __future__ import annotations

import pytest
import torch

from sglang.bundled import resolve_model_path
from sglang.kernels.ops.cpu import library
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.make_checkpoint import make_checkpoint
from sglang.test.model_rig import ModelRig, random_tokens

register_cpu_ci(est_time=60, suite="unit")

ARCHITECTURES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
KERNELS = ("torch", "native")
RELATIVE_ERROR = 1e-4  # of the logits' norm, fp32 against fp32


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    return {"demo": resolve_model_path("demo")} | {
        arch: str(make_checkpoint(root / arch, arch=arch, dtype="fp32", seed=1, wrapper=False))
        for arch in ARCHITECTURES
    }


@pytest.fixture(autouse=True)
def restore_kernels():
    yield
    library.select("auto")


@pytest.fixture(scope="module")
def references(checkpoints):
    """Per architecture: 100 tokens and the logits `transformers` gives them."""
    transformers = pytest.importorskip("transformers")
    found = {}
    for arch, path in checkpoints.items():
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        tokens = torch.randint(0, 4096, (100,), generator=torch.Generator().manual_seed(3))
        with torch.no_grad():
            found[arch] = (tokens.tolist(), model.eval()(tokens[None]).logits[0])
    return found


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("arch", [*ARCHITECTURES, "demo"])
def test_prefill_and_decode_match_transformers(arch, kernels, checkpoints, references):
    """Any wrong formula, weight cut or cache hand-over shows against an independent model."""
    tokens, want = references[arch]
    rig = ModelRig(checkpoints[arch], kernels=kernels)
    assert (rig.model.fused_step is not None) == (kernels == "native")
    prefill = rig.run(ForwardMode.EXTEND, [tokens[:80]], [0]).logits
    assert relative_error(prefill, want[:80]) < RELATIVE_ERROR
    assert relative_error(prefill[1:], want[:79]) > 0.1, "the measure must see a difference"
    for i in range(80, 100):
        logits = rig.run(ForwardMode.DECODE, [[tokens[i]]], [i]).logits
        assert relative_error(logits[0], want[i]) < RELATIVE_ERROR


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("cut", [1, 2, 3, 63, 64, 65, 99])
def test_prefill_split_anywhere_equals_one_pass(cut, kernels, checkpoints):
    """A lost conv window or state between chunks (F09, F118); exact with compiled kernels."""
    tokens = random_tokens_of(checkpoints)
    whole = ModelRig(checkpoints["qwen3_5"], kernels=kernels)
    want = whole.run(ForwardMode.EXTEND, [tokens], [0]).logits
    rig = ModelRig(checkpoints["qwen3_5"], kernels=kernels)
    first = rig.run(ForwardMode.EXTEND, [tokens[:cut]], [0]).logits
    second = rig.run(ForwardMode.EXTEND, [tokens[cut:]], [cut]).logits
    got = torch.cat([first, second])
    if kernels == "native":
        assert torch.equal(got, want)
        assert torch.equal(rig.states(1)[1], whole.states(1)[1])
    else:
        assert relative_error(got, want) < RELATIVE_ERROR


def random_tokens_of(checkpoints) -> list[int]:
    from_seed = torch.Generator().manual_seed(9)
    return torch.randint(0, 4096, (100,), generator=from_seed).tolist()


def test_deterministic_mode_refuses_plain_torch(checkpoints):
    """Torch's matmuls differ with the number of rows; a promise they cannot keep is refused."""
    ModelRig(checkpoints["qwen3_5"], kernels="native", batch_invariant=True)
    with pytest.raises(ValueError, match="enable-deterministic-inference needs the compiled"):
        ModelRig(checkpoints["qwen3_5"], kernels="torch", batch_invariant=True)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_packed_prompts_do_not_influence_each_other(arch, kernels, checkpoints):
    """Attention, conv or state that crosses the border of two packed prompts (F116)."""
    rig = ModelRig(checkpoints[arch], kernels=kernels)
    prompts = [random_tokens(rig.config, n, seed=n) for n in (5, 33, 1)]
    together = rig.run(ForwardMode.EXTEND, prompts, [0, 0, 0]).logits
    alone = ModelRig(checkpoints[arch], kernels=kernels)
    parts = [
        alone.run(ForwardMode.EXTEND, [prompt], [0], requests=[r]).logits
        for r, prompt in enumerate(prompts)
    ]
    if kernels == "native":
        assert torch.equal(together, torch.cat(parts))
    else:
        assert relative_error(together, torch.cat(parts)) < RELATIVE_ERROR


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_verify_rows_equal_decode_rows_in_any_batch(arch, checkpoints):
    """A verify row, a decode row and the same row in a larger batch: one set of bits (F03, F07)."""
    drafts = [[11, 12, 13, 14], [21, 22, 23, 24], [31, 32, 33, 34]]
    rigs = [
        ModelRig(checkpoints[arch], kernels="native", num_draft=4, lossless=lossless)
        for lossless in (False, True)
    ]
    plain = ModelRig(checkpoints[arch], kernels="native")
    prompts = [random_tokens(plain.config, n, seed=n) for n in (20, 7, 50)]
    lens = [len(prompt) for prompt in prompts]
    for rig in (*rigs, plain):
        rig.run(ForwardMode.EXTEND, prompts, [0, 0, 0])
    verified = [rig.run(ForwardMode.TARGET_VERIFY, drafts, lens).logits for rig in rigs]
    assert torch.equal(*verified)
    for r in range(3):
        for i in range(4):
            options = {"requests": [r]} if r != 1 else {"requests": [1, r + 1]}
            tokens = [[drafts[r][i]]] if r != 1 else [[drafts[1][i]], [5]]
            prefix = [lens[r] + i] if r != 1 else [lens[1] + i, lens[2]]
            if r == 1:
                saved = [x.clone() for x in plain.req_pool.mamba_pool.mamba_cache.conv]
                state = plain.req_pool.mamba_pool.mamba_cache.temporal.clone()
            row = plain.run(ForwardMode.DECODE, tokens, prefix, **options).logits[0]
            if r == 1:  # the companion request is only there to fill the batch
                cache = plain.req_pool.mamba_pool.mamba_cache
                cache.temporal[:, 3] = state[:, 3]
                cache.conv[0][:, 3] = saved[0][:, 3]
            assert torch.equal(row, verified[0][4 * r + i]), (r, i)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("lossless", [False, True], ids=["snapshots", "tuples"])
def test_partial_acceptance_restores_the_prefix_state(kernels, lossless, checkpoints):
    """Rejection at every position leaves the state of plain decoding, and of no other length."""
    tokens = [11, 12, 13, 14]
    path = checkpoints["qwen3_5"]
    for accepted in range(4):
        rig = ModelRig(path, kernels=kernels, num_draft=4, lossless=lossless)
        plain = ModelRig(path, kernels=kernels)
        prompt = random_tokens(rig.config, 10, seed=0)
        for one in (rig, plain):
            one.run(ForwardMode.EXTEND, [prompt], [0])
        rig.run(ForwardMode.TARGET_VERIFY, [tokens], [10])
        rig.commit([accepted], track_slots=[rig.track_slot(0)], track_steps=[0])
        states = []
        for i in range(accepted + 1):
            plain.run(ForwardMode.DECODE, [[tokens[i]]], [10 + i])
            states.append(plain.states(1))
        for got, want in zip(rig.states(1), states[-1]):
            if kernels == "native":
                assert torch.equal(got, want), accepted
            else:
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        for got, want in zip(rig.states(rig.track_slot(0)), states[0]):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernels", KERNELS)
def test_captures(kernels, checkpoints):
    """Taps are the residual stream after a layer, hidden is post-final-norm, rows as asked."""
    rig = ModelRig(checkpoints["qwen3_5"], kernels=kernels)
    tokens = random_tokens(rig.config, 9, seed=0)
    out = rig.run(
        ForwardMode.EXTEND,
        [tokens],
        [0],
        capture_hidden=CaptureHiddenMode.FULL,
        capture_layer_ids=(1, 3),
    )
    size = rig.config.hidden_size
    last_residual = out.taps[:, size:]
    want_hidden = rig.model.norm(last_residual)
    torch.testing.assert_close(out.hidden, want_hidden, rtol=1e-5, atol=1e-5)
    want_logits = rig.model.compute_logits(out.hidden)
    torch.testing.assert_close(out.logits, want_logits, rtol=1e-5, atol=1e-4)
    assert not torch.equal(out.taps[:, :size], last_residual)
    one = ModelRig(checkpoints["qwen3_5"], kernels=kernels).run(
        ForwardMode.EXTEND,
        [tokens],
        [0],
        logits_rows=torch.tensor([8]),
        capture_hidden=CaptureHiddenMode.LAST,
    )
    assert one.logits.shape[0] == one.hidden.shape[0] == 1
    torch.testing.assert_close(one.logits, out.logits[8:], rtol=1e-5, atol=1e-4)


def test_bad_token_is_an_error_and_names_its_row(checkpoints):
    """An id beyond the vocabulary must not read foreign memory."""
    rig = ModelRig(checkpoints["qwen3_5"], kernels="native")
    with pytest.raises(IndexError, match="row 1"):
        rig.run(ForwardMode.EXTEND, [[1, 4096, 2]], [0])


def test_bf16_weights_compute_in_fp32(checkpoints, tmp_path):
    """bf16 weights give the logits of the same weights widened to fp32, bit for bit."""
    path = str(make_checkpoint(tmp_path / "bf16", arch="qwen3_5", dtype="bf16", seed=1))
    narrow = ModelRig(path, kernels="native", dtype=torch.bfloat16)
    wide = ModelRig(path, kernels="native", dtype=torch.float32)
    tokens = random_tokens(wide.config, 30, seed=0)
    out = [rig.run(ForwardMode.EXTEND, [tokens], [0]).logits for rig in (narrow, wide)]
    assert torch.equal(*out)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
