"""Rotary embedding parameters out of either generation of Hugging Face keys. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ROPE_TYPES = ("default", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of the leading ``rotary_dim`` dims of a head, NeoX pairing.

    ``factor``, ``original_max_position_embeddings``, ``beta_fast``, ``beta_slow`` matter for
    ``rope_type="yarn"`` alone. ``attention_factor`` scales cos and sin.
    """

    theta: float
    rotary_dim: int
    rope_type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None


def rope_from_text_config(
    text: dict[str, Any], *, head_dim: int, default_theta: float, default_partial: float
) -> RopeConfig:
    """Read ``rope_parameters`` (new) or ``rope_theta`` + ``rope_scaling`` (old) of a text config.

    Raises:
        ValueError: the rope type is unknown, or YaRN lacks its factor.
    """
    params = dict(text.get("rope_scaling") or {})
    params.update(text.get("rope_parameters") or {})
    rope_type = str(params.get("rope_type", params.get("type", "default")))
    if rope_type not in ROPE_TYPES:
        raise ValueError(
            f"rope_type={rope_type!r} is not supported; supported are {', '.join(ROPE_TYPES)}"
        )
    partial = params.get("partial_rotary_factor", text.get("partial_rotary_factor"))
    explicit_dim = params.get("rope_dim", text.get("rope_dim"))
    rotary_dim = int(explicit_dim or head_dim * (default_partial if partial is None else partial))
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise ValueError(
            f"rotary dimension {rotary_dim} must be even and within head_dim={head_dim}; "
            "check partial_rotary_factor"
        )
    if rope_type == "yarn" and "factor" not in params:
        raise ValueError("rope_parameters.rope_type='yarn' needs rope_parameters.factor")
    original = params.get("original_max_position_embeddings", text.get("max_position_embeddings"))
    attention_factor = params.get("attention_factor")
    return RopeConfig(
        theta=float(params.get("rope_theta", text.get("rope_theta", default_theta))),
        rotary_dim=rotary_dim,
        rope_type=rope_type,
        factor=float(params.get("factor", 1.0)),
        original_max_position_embeddings=int(original or 0),
        beta_fast=float(params.get("beta_fast") or 32.0),
        beta_slow=float(params.get("beta_slow") or 1.0),
        attention_factor=None if attention_factor is None else float(attention_factor),
    )
