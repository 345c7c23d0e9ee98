"""Geometry of the three models and the length of each training stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from examples.demo_model.tokenizer import END_OF_TEXT_ID, IM_END_ID, MASK_ID, VOCAB_SIZE

MAX_POSITIONS = 8192
CHUNK = 64


@dataclass(frozen=True)
class TargetGeometry:
    """Sizes of the hybrid target; names follow the family's ``config.json``."""

    vocab_size: int = VOCAB_SIZE
    hidden_size: int = 256
    num_hidden_layers: int = 8
    full_attention_interval: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    rotary_dim: int = 16
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 64
    linear_value_head_dim: int = 64
    linear_conv_kernel_dim: int = 4
    intermediate_size: int = 768
    rope_theta: float = 10_000_000.0
    rms_norm_eps: float = 1e-6

    @property
    def key_dim(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        return 2 * self.key_dim + self.value_dim

    @property
    def layer_types(self) -> list[str]:
        return [
            "full_attention" if (i + 1) % self.full_attention_interval == 0 else "linear_attention"
            for i in range(self.num_hidden_layers)
        ]

    def to_config(self) -> dict[str, Any]:
        """``config.json`` of the exported checkpoint."""
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_output_gate": True,
            "bos_token_id": END_OF_TEXT_ID,
            "dtype": "bfloat16",
            "eos_token_id": END_OF_TEXT_ID,
            "full_attention_interval": self.full_attention_interval,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "layer_types": self.layer_types,
            "linear_conv_kernel_dim": self.linear_conv_kernel_dim,
            "linear_key_head_dim": self.linear_key_head_dim,
            "linear_num_key_heads": self.linear_num_key_heads,
            "linear_num_value_heads": self.linear_num_value_heads,
            "linear_value_head_dim": self.linear_value_head_dim,
            "mamba_ssm_dtype": "float32",
            "max_position_embeddings": MAX_POSITIONS,
            "mlp_only_layers": [],
            "model_type": "qwen3_5_text",
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "num_attention_heads": self.num_attention_heads,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": self.num_key_value_heads,
            "output_gate_type": "swish",
            "pad_token_id": END_OF_TEXT_ID,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [3, 3, 2],
                "partial_rotary_factor": self.rotary_dim / self.head_dim,
                "rope_theta": self.rope_theta,
                "rope_type": "default",
            },
            "tie_word_embeddings": True,
            "use_cache": True,
            "vocab_size": self.vocab_size,
        }


GENERATION_CONFIG = {
    "bos_token_id": END_OF_TEXT_ID,
    "do_sample": True,
    "eos_token_id": [IM_END_ID, END_OF_TEXT_ID],
    "pad_token_id": END_OF_TEXT_ID,
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.9,
}


@dataclass(frozen=True)
class DraftGeometry:
    """Sizes of one block drafter. ``block_size`` is the checkpoint's key: for DFLASH the number of
    query rows (anchor included), for DSPARK the number of drafts (gamma)."""

    kind: str  # "dflash" or "dspark"
    block_size: int
    target: TargetGeometry
    target_layer_ids: tuple[int, ...] = (1, 3, 5, 6)
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 768
    markov_rank: int = 64
    rope_theta: float = 10_000_000.0
    rms_norm_eps: float = 1e-6

    @property
    def num_drafts(self) -> int:
        return self.block_size - 1 if self.kind == "dflash" else self.block_size

    @property
    def first_draft_row(self) -> int:
        """DFLASH row ``i`` predicts its own position, so row 0 (the anchor) predicts nothing."""
        return 1 if self.kind == "dflash" else 0

    def to_config(self) -> dict[str, Any]:
        """``config.json`` of the exported draft checkpoint."""
        inner: dict[str, Any] = {
            "mask_token_id": MASK_ID,
            "target_layer_ids": list(self.target_layer_ids),
        }
        config: dict[str, Any] = {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "dflash_config": inner,
            "dtype": "bfloat16",
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.target.hidden_size,
            "intermediate_size": self.intermediate_size,
            "is_causal": False,
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "max_position_embeddings": MAX_POSITIONS,
            "model_type": "qwen3",
            "num_attention_heads": self.num_attention_heads,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": self.num_key_value_heads,
            "num_target_layers": self.target.num_hidden_layers,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "tie_word_embeddings": False,
            "vocab_size": self.target.vocab_size,
        }
        if self.kind == "dflash":
            inner["block_size"] = self.block_size
            return {"architectures": ["DFlashDraftModel"], **config}
        inner["projector_type"] = "dspark"
        return {
            "architectures": ["DSparkDraftModel"],
            "block_size": self.block_size,
            "confidence_head_with_markov": True,
            "enable_confidence_head": True,
            "markov_head_type": "vanilla",
            "markov_rank": self.markov_rank,
            **config,
        }


@dataclass(frozen=True)
class Phase:
    """One run of the optimiser: ``steps`` batches of ``rows`` sequences of ``length`` tokens."""

    steps: int
    rows: int
    length: int
    peak_lr: float


@dataclass(frozen=True)
class Plan:
    """Everything that decides how long training takes."""

    target: TargetGeometry
    pretrain: Phase
    long_pretrain: Phase
    chat: Phase
    mtp: Phase
    drafter: Phase
    own_text_batches: int
    own_text_rows: int
    own_text_length: int
    eval_rows: int
    eval_prompt: int
    eval_length: int
    held_out_tokens: int
    save_every: int
    draft_layers: int = 3

    def drafter_geometry(self, kind: str) -> DraftGeometry:
        block_size = {"dflash": 8, "dspark": 7}[kind]
        return DraftGeometry(
            kind, block_size, self.target, num_hidden_layers=self.draft_layers,
            target_layer_ids=self._taps(),
        )  # fmt: skip

    def _taps(self) -> tuple[int, ...]:
        return (1, 3, 5, 6) if self.target.num_hidden_layers == 8 else (0, 2)


FULL_PLAN = Plan(
    target=TargetGeometry(),
    pretrain=Phase(steps=1870, rows=64, length=512, peak_lr=3e-3),
    long_pretrain=Phase(steps=212, rows=16, length=2048, peak_lr=6e-4),
    chat=Phase(steps=212, rows=64, length=512, peak_lr=6e-4),
    mtp=Phase(steps=425, rows=64, length=384, peak_lr=1e-3),
    drafter=Phase(steps=850, rows=64, length=384, peak_lr=2e-3),
    own_text_batches=2,
    own_text_rows=8192,
    own_text_length=384,
    eval_rows=256,
    eval_prompt=64,
    eval_length=320,
    held_out_tokens=1 << 20,
    save_every=1000,
)

SMOKE_PLAN = Plan(
    target=TargetGeometry(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        intermediate_size=64,
    ),
    pretrain=Phase(steps=4, rows=2, length=96, peak_lr=1e-3),
    long_pretrain=Phase(steps=1, rows=1, length=160, peak_lr=1e-3),
    chat=Phase(steps=2, rows=2, length=96, peak_lr=1e-3),
    mtp=Phase(steps=2, rows=2, length=64, peak_lr=1e-3),
    drafter=Phase(steps=2, rows=2, length=64, peak_lr=1e-3),
    own_text_batches=1,
    own_text_rows=4,
    own_text_length=64,
    eval_rows=4,
    eval_prompt=16,
    eval_length=64,
    held_out_tokens=2048,
    save_every=2,
    draft_layers=1,
)
