"""The gated delta rule in fp32: a chunked form for training, one step for generation."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def l2_normalise(x: torch.Tensor) -> torch.Tensor:
    """Unit length over the last axis."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def chunked_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk: int,
) -> torch.Tensor:
    """Run the recurrence from a zero state over whole sequences.

    Args:
        q, k: ``[B, HV, T, K]`` fp32, normalised; q already scaled.
        v: ``[B, HV, T, V]`` fp32.
        g: ``[B, HV, T]`` fp32 log decay, at most 0.
        beta: ``[B, HV, T]`` fp32 write strength.
        chunk: rows handled at once; any T works, the tail is padded with rows that do nothing.

    Returns:
        ``[B, HV, T, V]`` fp32.
    """
    length = q.shape[2]
    pad = -length % chunk
    if pad:
        q, k, v = (F.pad(x, (0, 0, 0, pad)) for x in (q, k, v))
        g, beta = F.pad(g, (0, pad)), F.pad(beta, (0, pad))
    q, k, v = (x.unflatten(2, (-1, chunk)) for x in (q, k, v))
    g, beta = g.unflatten(2, (-1, chunk)), beta.unflatten(2, (-1, chunk))

    decay = g.cumsum(-1)
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    span = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(~lower, float("-inf")).exp()
    keys_by_beta = k * beta.unsqueeze(-1)
    # System of the chunk: unit lower triangular, solved for the values and the keys together.
    system = ((keys_by_beta @ k.transpose(-1, -2)) * span).tril(-1)
    right = torch.cat([v * beta.unsqueeze(-1), keys_by_beta * decay.exp().unsqueeze(-1)], dim=-1)
    values, weights = (invert_unit_lower(system) @ right).split([v.shape[-1], k.shape[-1]], dim=-1)
    inside = (q @ k.transpose(-1, -2)) * span
    queries = q * decay.exp().unsqueeze(-1)
    last = decay[..., -1:]
    keys_to_end = k * (last - decay).exp().unsqueeze(-1)
    chunk_decay = last.exp().unsqueeze(-1)

    state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    outputs = []
    parts = (values, weights, queries, inside, chunk_decay, keys_to_end.transpose(-1, -2))
    for value, weight, query, square, shrink, key in zip(
        *(part.unbind(2) for part in parts), strict=True
    ):
        written = value - weight @ state
        outputs.append(query @ state + square @ written)
        state = state * shrink + key @ written
    return torch.stack(outputs, dim=2).flatten(2, 3)[:, :, :length]


def invert_unit_lower(strict: torch.Tensor) -> torch.Tensor:
    """``(I + strict)^-1`` for a strictly lower triangular ``[..., C, C]``, C = 8 times a power of 2.

    Blocks of 8 by their (finite) Neumann product, then pairs of blocks joined until one is left:
    a few batched products instead of a row-by-row solve. Larger first blocks would cancel badly
    when the keys of a chunk are alike.
    """
    size, total = 8, strict.shape[-1]
    low = _diagonal_blocks(strict, size)
    square = low @ low
    eye = torch.eye(size, device=strict.device, dtype=strict.dtype)
    inverse = eye - low
    inverse = inverse + inverse @ square
    inverse = inverse + inverse @ (square @ square)
    while size < total:
        below = _diagonal_blocks(strict, 2 * size)[..., size:, :size]
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -(second @ below @ first)
        top = torch.cat([first, torch.zeros_like(first)], dim=-1)
        inverse = torch.cat([top, torch.cat([corner, second], dim=-1)], dim=-2)
        size *= 2
    return inverse.squeeze(-3)


def _diagonal_blocks(matrix: torch.Tensor, size: int) -> torch.Tensor:
    """``[..., C, C]`` -> its diagonal blocks ``[..., C/size, size, size]``."""
    grid = matrix.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))
    return grid.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def delta_rule_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """One token; ``state`` ``[B, HV, K, V]`` fp32 is updated in place.

    q, k ``[B, HV, K]``, v ``[B, HV, V]``, g and beta ``[B, HV]``; returns ``[B, HV, V]``.
    """
    state.mul_(g.exp()[..., None, None])
    remembered = (k.unsqueeze(-2) @ state).squeeze(-2)
    written = beta.unsqueeze(-1) * (v - remembered)
    state.add_(k.unsqueeze(-1) * written.unsqueeze(-2))
    return (q.unsqueeze(-2) @ state).squeeze(-2)
