"""The MTP draft block against an fp32 reference written out from models.md 4.6."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from sglang.kernels.ops.cpu import library
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.make_checkpoint import make_checkpoint
from sglang.test.model_rig import ModelRig, random_tokens

register_cpu_ci(est_time=20, suite="unit")

KERNELS = ("torch", "native")


@pytest.fixture(autouse=True)
def restore_kernels():
    yield
    library.select("auto")


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_5_moe"])
def checkpoint(request, tmp_path_factory):
    out = tmp_path_factory.mktemp(request.param) / "model"
    return make_checkpoint(out, arch=request.param, dtype="fp32", seed=5)


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + weight)


def rope(x: torch.Tensor, rotary_dim: int, theta: float) -> torch.Tensor:
    half = rotary_dim // 2
    freq = theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = torch.arange(x.shape[0], dtype=torch.float32)[:, None] * freq
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :half], x[..., half:rotary_dim]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., rotary_dim:]], dim=-1)


def reference(path, config, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """(logits, post-norm hidden) of MTP rows at positions 0..T-1."""
    w = load_file(path / "model.safetensors")
    embedded = norm(w["model.embed_tokens.weight"][ids], w["mtp.pre_fc_norm_embedding.weight"])
    joined = torch.cat([embedded, norm(hidden, w["mtp.pre_fc_norm_hidden.weight"])], dim=-1)
    x = joined @ w["mtp.fc.weight"].t()
    p = "mtp.layers.0."
    h = norm(x, w[p + "input_layernorm.weight"])
    rows, n, kv, d = len(ids), config.num_attention_heads, config.num_key_value_heads, 64
    q, gate = (h @ w[p + "self_attn.q_proj.weight"].t()).view(rows, n, 2 * d).chunk(2, dim=-1)
    k = (h @ w[p + "self_attn.k_proj.weight"].t()).view(rows, kv, d)
    v = (h @ w[p + "self_attn.v_proj.weight"].t()).view(rows, kv, d)
    q = rope(norm(q, w[p + "self_attn.q_norm.weight"]), config.rope.rotary_dim, config.rope.theta)
    k = rope(norm(k, w[p + "self_attn.k_norm.weight"]), config.rope.rotary_dim, config.rope.theta)
    k, v = (t.repeat_interleave(n // kv, dim=1) for t in (k, v))
    scores = torch.einsum("tnd,snd->nts", q, k) / d**0.5
    scores += torch.full((rows, rows), -torch.inf).triu(1)
    out = torch.einsum("nts,snd->tnd", scores.softmax(-1), v) * torch.sigmoid(gate)
    x = x + out.reshape(rows, -1) @ w[p + "self_attn.o_proj.weight"].t()
    x = x + mlp(w, p + "mlp.", norm(x, w[p + "post_attention_layernorm.weight"]), config)
    m = norm(x, w["mtp.norm.weight"])
    return m @ w["lm_head.weight"].t(), m


def swiglu(x, gate, up, down) -> torch.Tensor:
    return (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()


def mlp(w, p: str, x: torch.Tensor, config) -> torch.Tensor:
    def dense(prefix: str) -> torch.Tensor:
        return swiglu(x, *(w[f"{prefix}{n}_proj.weight"] for n in ("gate", "up", "down")))

    if config.num_experts == 0:
        return dense(p)
    probs = (x @ w[p + "gate.weight"].t()).softmax(-1)
    weights, chosen = probs.topk(config.num_experts_per_tok, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    out = torch.sigmoid(x @ w[p + "shared_expert_gate.weight"].t()) * dense(p + "shared_expert.")
    for t in range(x.shape[0]):
        for weight, e in zip(weights[t], chosen[t]):
            gate, up = w[p + "experts.gate_up_proj"][e].chunk(2)
            out[t] += weight * swiglu(x[t], gate, up, w[p + "experts.down_proj"][e])
    return out


@pytest.mark.parametrize("kernels", KERNELS)
def test_rows_match_the_reference_in_one_pass_and_step_by_step(kernels, checkpoint):
    """Wrong half order in fc, position t + 1, a missing norm, or a KV row off by one."""
    rig = ModelRig(str(checkpoint), kernels=kernels, with_mtp=True)
    ids = random_tokens(rig.config, 11, seed=1)
    hidden = torch.randn(11, rig.config.hidden_size, generator=torch.Generator().manual_seed(0))
    want, want_hidden = reference(checkpoint, rig.config, torch.tensor(ids), hidden)
    options = {"with_state": False, "capture_hidden": CaptureHiddenMode.LAST}
    fb = rig.batch(ForwardMode.DRAFT_EXTEND, [ids[:8]], [0], spec_hidden=hidden[:8], **options)
    outs = [rig.run_draft(fb)]
    for t in range(8, 11):
        row = hidden[t : t + 1]
        fb = rig.batch(ForwardMode.DECODE, [[ids[t]]], [t], spec_hidden=row, **options)
        outs.append(rig.run_draft(fb))
    got = torch.cat([out.logits for out in outs])
    assert ((got - want).norm() / want.norm()).item() < 1e-4
    got_hidden = torch.cat([out.hidden for out in outs])
    assert ((got_hidden - want_hidden).norm() / want_hidden.norm()).item() < 1e-4


def test_draft_shares_embedding_and_head(checkpoint):
    """The block owns neither; a second copy would double the largest tensors."""
    rig = ModelRig(str(checkpoint), kernels="native", with_mtp=True)
    assert rig.draft.embed_tokens is rig.model.embed_tokens
    assert rig.draft.lm_head is rig.model.lm_head
    assert rig.config.num_hidden_layers == len(rig.model.layers) == 4


def test_missing_hidden_is_an_error(checkpoint):
    rig = ModelRig(str(checkpoint), kernels="native", with_mtp=True)
    fb = rig.batch(ForwardMode.DECODE, [[1]], [0], with_state=False)
    with pytest.raises(ValueError, match="spec_hidden is None"):
        rig.run_draft(fb)


def test_checkpoint_without_mtp_is_refused(tmp_path):
    path = make_checkpoint(tmp_path / "plain", arch="qwen3_5", dtype="fp32", mtp=False)
    with pytest.raises(ValueError, match="--speculative-algorithm"):
        ModelRig(str(path), kernels="native", with_mtp=True)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
