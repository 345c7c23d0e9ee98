"""Block drafters computed the slow way, straight from a checkpoint's tensors, in fp32.

No pool, no batch, no incremental state: one request, all of its context at once. Sources: the
formulas of docs/design/drafters.md.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F


class DraftReference:
    """One draft checkpoint. ``embedding`` and ``head`` [vocab, H] are the target's."""

    def __init__(self, directory: str, embedding: Tensor, head: Tensor) -> None:
        self.config = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))
        raw = load_file(str(Path(directory) / "model.safetensors"))
        self.w = {name.removeprefix("model."): t.float() for name, t in raw.items()}
        self.keys = self.config | self.config["dflash_config"]
        self.embedding, self.head = embedding.float(), head.float()
        self.block = self.keys["block_size"]
        self.head_dim = self.config["head_dim"]

    def context(self, taps: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Per layer keys [L, Nkv, d] and values of tokens 0 .. L-1 from taps [L, F*H]."""
        features = self.norm(taps.float() @ self.w["fc.weight"].T, "hidden_norm.weight")
        positions = torch.arange(taps.shape[0])
        return [
            self.keys_values(i, features, positions)
            for i in range(self.config["num_hidden_layers"])
        ]

    def hidden_rows(self, taps: Tensor, bonus: int, num_rows: int) -> Tensor:
        """Final-norm rows [num_rows, H] of ``[bonus, MASK, ...]`` after the context of ``taps``."""
        length = taps.shape[0]
        ids = [bonus] + [self.keys["mask_token_id"]] * (num_rows - 1)
        x = self.embedding[ids]
        positions = torch.arange(length, length + num_rows)
        for i, (ctx_k, ctx_v) in enumerate(self.context(taps)):
            own = f"layers.{i}."

            def attend(y: Tensor, i: int = i, k: Tensor = ctx_k, v: Tensor = ctx_v) -> Tensor:
                return self.attention(i, y, k, v, positions)

            def feed(y: Tensor, own: str = own) -> Tensor:
                gate = F.silu(y @ self.w[f"{own}mlp.gate_proj.weight"].T)
                up = y @ self.w[f"{own}mlp.up_proj.weight"].T
                return (gate * up) @ self.w[f"{own}mlp.down_proj.weight"].T

            x = x + self.convolved(
                own + "attention_conv.", self.norm(x, own + "input_layernorm.weight"), attend
            )
            x = x + self.convolved(
                own + "mlp_conv.", self.norm(x, own + "post_attention_layernorm.weight"), feed
            )
        return self.norm(x, "norm.weight")

    def dflash(self, taps: Tensor, bonus: int) -> list[int]:
        """Greedy drafts of DFLASH and DFlash2."""
        rows = self.hidden_rows(taps, bonus, self.block)[1:]
        logits = rows @ self.head.T
        if "selector_rank" not in self.keys:
            return logits.argmax(-1).tolist()
        own = "candidate_selector."
        projected = rows @ self.w[own + "hidden_projection.weight"].T
        drafts, previous = [], bonus
        for i in range(len(rows)):
            best = logits[i].topk(self.keys["selector_top_k"])
            left = self.w[own + "predecessor_codebook"][previous] * projected[i]
            scores = best.values + self.w[own + "successor_codebook"][best.indices] @ left
            previous = int(best.indices[scores.argmax()])
            drafts.append(previous)
        return drafts

    def dspark(self, taps: Tensor, bonus: int) -> list[int]:
        """Greedy drafts of DSPARK."""
        anchored = self.config["sample_from_anchor"]
        rows = self.hidden_rows(taps, bonus, self.block + (not anchored))
        rows = rows if anchored else rows[1:]
        drafts, previous = [], bonus
        state = torch.zeros(self.config["markov_rank"])
        for row in rows:
            latent, state = self.latent(previous, row, state)
            logits = row @ self.head.T + self.w["markov_head.markov_w2.weight"] @ latent
            previous = int(logits.argmax())
            drafts.append(previous)
        return drafts

    def latent(self, previous: int, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self.w["markov_head.markov_w1.weight"][previous]
        kind = self.config["markov_head_type"]
        if kind == "gated":
            mixed = self.w["markov_head.gate_proj.weight"] @ torch.cat([row, embedded])
            return torch.sigmoid(mixed) * embedded, state
        if kind == "rnn":
            joint = self.w["markov_head.joint_proj.weight"] @ torch.cat([state, embedded, row])
            gate, new, out = (joint + self.w["markov_head.joint_proj.bias"]).chunk(3)
            keep = torch.sigmoid(gate)
            return torch.tanh(out), keep * state + (1 - keep) * torch.tanh(new)
        return embedded, state

    def attention(
        self, i: int, y: Tensor, ctx_k: Tensor, ctx_v: Tensor, positions: Tensor
    ) -> Tensor:
        own = f"layers.{i}.self_attn."
        q = (y @ self.w[own + "q_proj.weight"].T).view(len(y), -1, self.head_dim)
        q = self.rotate(self.norm(q, own + "q_norm.weight"), positions)
        k, v = self.keys_values(i, y, positions)
        k, v = torch.cat([ctx_k, k]), torch.cat([ctx_v, v])
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.head_dim**-0.5
        distance = positions[:, None] - torch.arange(len(k))[None]
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if self.config["layer_types"][i] == "sliding_attention":
            hidden |= distance.abs() >= self.config["sliding_window"]
        if self.config.get("is_causal"):
            hidden |= distance < 0
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", weights, v).reshape(len(y), -1)
        return mixed @ self.w[own + "o_proj.weight"].T

    def keys_values(self, i: int, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        own = f"layers.{i}.self_attn."
        k = (x @ self.w[own + "k_proj.weight"].T).view(len(x), -1, self.head_dim)
        v = (x @ self.w[own + "v_proj.weight"].T).view(len(x), -1, self.head_dim)
        return self.rotate(self.norm(k, own + "k_norm.weight"), positions), v

    def convolved(self, own: str, x: Tensor, sublayer) -> Tensor:
        if own + "base_kernel" not in self.w:
            return sublayer(x)
        base, group = self.w[own + "base_kernel"], self.keys["conv_group_size"]
        taps = base.shape[1]
        added = (x @ self.w[own + "kernel_projection.weight"].T).view(len(x), 2, taps, -1)

        def conv(side: int, y: Tensor) -> Tensor:
            out = torch.zeros_like(y)
            for row in range(len(y)):
                for tap in range(min(taps, row + 1)):
                    kernel = base[side, tap] + added[row, side, tap].repeat_interleave(group)
                    out[row] += kernel * y[row - tap]
            return out

        return conv(1, sublayer(conv(0, x)))

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * self.w[name]

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [T, heads, d]; pairs (i, i + d/2), no YaRN."""
        half = self.head_dim // 2
        theta = self.config["rope_parameters"]["rope_theta"]
        angle = positions[:, None] * theta ** (-torch.arange(half) / half)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
