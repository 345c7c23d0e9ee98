"""Which kernels run, and whether lossless verify can be exact with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sglang.srt.arg_groups.basic_hook import detect_device
from sglang.srt.arg_groups.flag import spell
from sglang.srt.arg_groups.speculative_hook import effective_topk
from sglang.srt.environ import envs
from sglang.srt.speculative.ragged_verify import RaggedVerifyMode

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

LOSSLESS_FLAG = "--enable-linear-lossless-verify"
LOSSLESS_DEVICES = ("cuda", "cpu")
"""cuda is NVIDIA and ROCm; the CPU engine has the same replay."""
LOSSLESS_ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN", "DFLASH", "DSPARK", "STANDALONE")


def handle_attention_backend(args: ServerArgs) -> ServerArgs:
    """Choose the kernels of the full-attention layers; each device has its own."""
    own = "torch_native" if args.device == "cpu" else "triton"
    if args.attention_backend not in (None, own):
        raise ValueError(
            f"--attention-backend {args.attention_backend} does not run on --device {args.device}; "
            f"leave it out, or use {own}"
        )
    return replace(args, attention_backend=own)


def handle_linear_attn_backend(args: ServerArgs) -> ServerArgs:
    """Refuse kernels of the linear-attention layers that the device cannot run."""
    impossible, way_out = ("flashinfer", "the CPU engine has its own kernels; leave it out")
    if args.device != "cpu":
        impossible, way_out = ("torch_native", "it is the CPU engine's; use triton on a GPU")
    names = (
        "linear_attn_backend",
        "linear_attn_decode_backend",
        "linear_attn_prefill_backend",
        "linear_attn_verify_backend",
    )
    for name in names:
        if args.__dict__[name] == impossible:
            raise ValueError(f"{spell(name)} {impossible}: {way_out}")
    return args


def effective_verify_backend(args: ServerArgs) -> str:
    """Kernels that verify steps of the linear-attention layers will use."""
    if args.linear_attn_verify_backend is not None:
        return args.linear_attn_verify_backend
    decode = args.linear_attn_decode_backend or args.linear_attn_backend
    return "flashinfer" if decode == "flashinfer" else "triton"


def effective_device(args: ServerArgs) -> str:
    """The device's name, also before resolution."""
    return detect_device() if args.device == "auto" else args.device


@dataclass(frozen=True)
class LosslessRule:
    """One thing that lossless verify cannot work with.

    `broken` says whether the arguments ask for it; `message` gives flag, value and the way out.
    """

    name: str
    broken: Callable[[ServerArgs], bool]
    message: Callable[[ServerArgs], str]


def _replayssm_flag(args: ServerArgs) -> str | None:
    if args.enable_linear_replayssm_spec:
        return "--enable-linear-replayssm-spec"
    return "--enable-linear-replayssm" if args.enable_linear_replayssm else None


def _verify_backend_is_wrong(args: ServerArgs) -> bool:
    # The CPU engine has one verify routine and ignores the choice among GPU kernels.
    return effective_device(args) != "cpu" and effective_verify_backend(args) != "triton"


LOSSLESS_RULES: tuple[LosslessRule, ...] = (
    LosslessRule(
        "no algorithm",
        lambda a: a.speculative_algorithm is None,
        lambda a: "needs speculative decoding; add --speculative-algorithm NEXTN, or leave it out",
    ),
    LosslessRule(
        "ngram",
        lambda a: a.speculative_algorithm == "NGRAM",
        lambda a: (
            "does not work with --speculative-algorithm NGRAM, whose drafts are verified as a "
            "tree; use NEXTN, DFLASH or DSPARK, or leave it out"
        ),
    ),
    LosslessRule(
        "unknown algorithm",
        lambda a: a.speculative_algorithm not in (None, "NGRAM", *LOSSLESS_ALGORITHMS),
        lambda a: (
            f"does not know --speculative-algorithm {a.speculative_algorithm}; use one of "
            f"{', '.join(LOSSLESS_ALGORITHMS)}"
        ),
    ),
    LosslessRule(
        "tree",
        lambda a: (
            a.speculative_algorithm in LOSSLESS_ALGORITHMS and effective_topk(a) not in (None, 1)
        ),
        lambda a: (
            "needs a linear chain of drafts, --speculative-eagle-topk 1, got "
            f"{a.speculative_eagle_topk}"
        ),
    ),
    LosslessRule(
        "replayssm",
        lambda a: _replayssm_flag(a) is not None,
        lambda a: f"and {_replayssm_flag(a)} exclude each other; leave one of them out",
    ),
    LosslessRule(
        "verify backend",
        _verify_backend_is_wrong,
        lambda a: (
            f"needs triton kernels for verify steps, but {effective_verify_backend(a)} would run; "
            "pass --linear-attn-verify-backend triton"
        ),
    ),
    LosslessRule(
        "unified memory",
        lambda a: a.enable_unified_memory,
        lambda a: "does not work with --enable-unified-memory; leave one of them out",
    ),
    LosslessRule(
        "ragged verify",
        lambda a: envs.SGLANG_RAGGED_VERIFY_MODE.get() != RaggedVerifyMode.STATIC.value,
        lambda a: (
            "needs the same number of verify rows for each request; set "
            "SGLANG_RAGGED_VERIFY_MODE=static, got "
            f"{envs.SGLANG_RAGGED_VERIFY_MODE.get()}"
        ),
    ),
    LosslessRule(
        "platform",
        lambda a: effective_device(a) not in LOSSLESS_DEVICES,
        lambda a: (
            f"has no exact replay on --device {effective_device(a)}; it works on "
            f"{' and '.join(LOSSLESS_DEVICES)} (CUDA, ROCm, CPU). Leave it out there"
        ),
    ),
)


def validate_linear_lossless_verify(server_args: ServerArgs) -> None:
    """Refuse combinations in which lossless verify could not be exact.

    Works on a record before and after resolution. Returns silently when the flag is off.
    Raises: ValueError with every broken rule, each naming flag, value and the way out.
    """
    if not server_args.enable_linear_lossless_verify:
        if server_args.linear_lossless_commit != "immediate":
            raise ValueError(
                f"--linear-lossless-commit {server_args.linear_lossless_commit} needs "
                f"{LOSSLESS_FLAG}; give both or neither"
            )
        return
    broken = [rule.message(server_args) for rule in LOSSLESS_RULES if rule.broken(server_args)]
    if broken:
        raise ValueError("; ".join(f"{LOSSLESS_FLAG} {message}" for message in broken))
