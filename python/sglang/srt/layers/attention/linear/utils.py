"""Which kernels serve linear attention, and which scratch rows a verify uses."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_exec

# Graph capture and eager padding round a batch up to at most this many extra rows.
MAX_PADDED_ROWS = 1024


class LinearAttnKernelBackend(Enum):
    """Kernel families for linear attention. Only those that a dispatcher declares can be selected."""

    TRITON = "triton"
    CUTEDSL = "cutedsl"
    NV_CUTEDSL = "nv_cutedsl"
    FLASHINFER = "flashinfer"
    FLASHKDA = "flashkda"
    NVIDIA_KDA = "nvidia_kda"
    PTX_KDA = "ptx_kda"
    HELION = "helion"
    INTEL_XPU = "intel_xpu"
    CUDA_CPP = "cuda_cpp"
    CUSTOM = "custom"

    @classmethod
    def _missing_(cls, value: object) -> LinearAttnKernelBackend:
        return cls.CUSTOM

    def is_triton(self) -> bool:
        return self is LinearAttnKernelBackend.TRITON

    def is_cutedsl(self) -> bool:
        return self is LinearAttnKernelBackend.CUTEDSL

    def is_nv_cutedsl(self) -> bool:
        return self is LinearAttnKernelBackend.NV_CUTEDSL

    def is_flashinfer(self) -> bool:
        return self is LinearAttnKernelBackend.FLASHINFER

    def is_flashkda(self) -> bool:
        return self is LinearAttnKernelBackend.FLASHKDA

    def is_nvidia_kda(self) -> bool:
        return self is LinearAttnKernelBackend.NVIDIA_KDA

    def is_ptx_kda(self) -> bool:
        return self is LinearAttnKernelBackend.PTX_KDA

    def is_helion(self) -> bool:
        return self is LinearAttnKernelBackend.HELION

    def is_intel_xpu(self) -> bool:
        return self is LinearAttnKernelBackend.INTEL_XPU

    def is_cuda_cpp(self) -> bool:
        return self is LinearAttnKernelBackend.CUDA_CPP

    def is_custom(self) -> bool:
        return self is LinearAttnKernelBackend.CUSTOM


@dataclass(frozen=True)
class LinearAttnBackends:
    """The kernel family of each phase."""

    decode: LinearAttnKernelBackend
    prefill: LinearAttnKernelBackend
    verify: LinearAttnKernelBackend


def select_linear_attn_backends(
    base: str,
    *,
    decode: str | None = None,
    prefill: str | None = None,
    verify: str | None = None,
    prefill_default: str | None = None,
) -> LinearAttnBackends:
    """Families for the flags' values; an unset phase follows `base`.

    An unset verify is flashinfer when decode is flashinfer, else triton.
    """
    chosen_decode = LinearAttnKernelBackend(decode or base)
    chosen_prefill = LinearAttnKernelBackend(prefill or prefill_default or base)
    if verify is not None:
        chosen_verify = LinearAttnKernelBackend(verify)
    elif chosen_decode.is_flashinfer():
        chosen_verify = LinearAttnKernelBackend.FLASHINFER
    else:
        chosen_verify = LinearAttnKernelBackend.TRITON
    return LinearAttnBackends(chosen_decode, chosen_prefill, chosen_verify)


def resolve_linear_attn_backends(prefill_default: str | None = None) -> LinearAttnBackends:
    """Families for the arguments that this process published.

    `prefill_default` serves prompts where --linear-attn-prefill-backend is not given.
    """
    args = get_exec().mamba
    return select_linear_attn_backends(
        args.linear_attn_backend,
        decode=args.linear_attn_decode_backend,
        prefill=args.linear_attn_prefill_backend,
        verify=args.linear_attn_verify_backend,
        prefill_default=prefill_default,
    )


def pp_spec_stable_rows_enabled() -> bool:
    """Whether verify scratch is keyed by request rows; reads SGLANG_ENABLE_PP_SPEC each call."""
    return bool(envs.SGLANG_ENABLE_PP_SPEC.get())


def select_verify_intermediate_state_indices(
    default_indices: torch.Tensor,
    req_pool_indices: torch.Tensor,
    valid: torch.Tensor,
    pool_size: int,
) -> torch.Tensor:
    """Scratch row of each request of a verify.

    Without stable rows: `default_indices` itself. With them: int32, the request row where `valid`, else
    `pool_size` (the discard row).
    """
    if not pp_spec_stable_rows_enabled():
        return default_indices
    discard = torch.full_like(req_pool_indices, pool_size)
    return torch.where(valid, req_pool_indices, discard).to(torch.int32)


def build_verify_intermediate_state_indices(
    pool_size: int, device: torch.device | str
) -> torch.Tensor:
    """int32 0..pool_size-1, then `pool_size` (the discard row) for every row that padding may add."""
    indices = torch.arange(pool_size + MAX_PADDED_ROWS, dtype=torch.int32, device=device)
    return indices.clamp_(max=pool_size)
