"""Log decay and beta of the gated delta rule from the raw projections."""

from __future__ import annotations

import torch

from sglang.kernels import triton_support

if triton_support.AVAILABLE:
    import triton
    import triton.language as tl

    from sglang.kernels.ops.attention.fla.gdn_step import gate_values

    @triton.jit
    def _gating_kernel(
        g_output,
        beta_output,
        a,
        b,
        a_log,
        dt_bias,
        num_elements,
        a_stride_token,
        b_stride_token,
        HV: tl.constexpr,
        SOFTPLUS_BETA: tl.constexpr,
        SOFTPLUS_THRESHOLD: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = offs < num_elements
        safe = tl.where(inside, offs, 0)
        token = safe // HV
        head = safe % HV
        g, beta = gate_values(
            a + token * a_stride_token + head,
            b + token * b_stride_token + head,
            tl.load(a_log + head).to(tl.float32),
            tl.load(dt_bias + head).to(tl.float32),
            SOFTPLUS_BETA,
            SOFTPLUS_THRESHOLD,
        )
        tl.store(g_output + offs, g, mask=inside)
        tl.store(beta_output + offs, beta, mask=inside)


def fused_gdn_gating(
    A_log: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    dt_bias: torch.Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(g, beta), each fp32 [1, tokens, HV], from a, b [tokens, HV] with any row stride.

    g = -exp(A_log) * softplus(a + dt_bias); beta = sigmoid(b), never narrowed to b's dtype.
    CPU tensors take the PyTorch form.
    """
    num_tokens, num_heads = a.shape
    if not triton_support.runs_on(a):
        shifted = a.float() + dt_bias.float()
        soft = torch.nn.functional.softplus(shifted, beta, threshold)
        return (-A_log.float().exp() * soft)[None], b.float().sigmoid()[None]
    g_output = torch.empty(1, num_tokens, num_heads, dtype=torch.float32, device=a.device)
    beta_output = torch.empty(1, num_tokens, num_heads, dtype=torch.float32, device=a.device)
    if num_tokens:
        block = 256
        _gating_kernel[(-(-num_tokens * num_heads // block),)](
            g_output,
            beta_output,
            a,
            b,
            A_log,
            dt_bias,
            num_tokens * num_heads,
            a.stride(0),
            b.stride(0),
            HV=num_heads,
            SOFTPLUS_BETA=beta,
            SOFTPLUS_THRESHOLD=threshold,
            BLOCK=block,
        )
    return g_output, beta_output
