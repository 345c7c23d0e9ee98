"""Arguments that exist in SGLang's vocabulary but whose subsystem this build does not have.

They are read, so that a command line written for another server gets a sentence instead of a silent
difference. An entry goes away together with the commit that brings its subsystem.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt.arg_groups.flag import Flag, spell

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


@dataclass(frozen=True)
class Missing:
    """Why a flag, or some of its values, cannot be used.

    `values` are the refused values; empty means every value except the default.
    """

    sentence: str
    values: tuple[Any, ...] = ()

    def applies_to(self, value: Any, default: Any) -> bool:
        """Whether this value asks for what is missing."""
        return value in self.values if self.values else value != default


@dataclass(frozen=True)
class MissingTogether:
    """Flags that work, but not with one another."""

    asked: Callable[[ServerArgs], bool]
    sentence: str


_ONE_DEVICE = "this build runs a model on one device; leave it at 1"
_NO_PD = "this build serves whole requests; leave --disaggregation-mode at null"
_NO_FLASHINFER = "this build's GPU kernels are its own; use triton"

NOT_IN_THIS_BUILD: dict[str, Missing] = {
    "grpc_mode": Missing("gRPC is not served; use the HTTP routes, which routers understand too"),
    "tp_size": Missing(_ONE_DEVICE),
    "pp_size": Missing(_ONE_DEVICE),
    "dist_init_addr": Missing("this build has no ranks that need to meet; leave it out"),
    "dist_timeout": Missing("this build has no ranks that need to meet; leave it out"),
    "disaggregation_mode": Missing(_NO_PD),
    "disaggregation_transfer_backend": Missing(_NO_PD),
    "disaggregation_bootstrap_port": Missing(_NO_PD),
    "disaggregation_transfer_timeout": Missing(_NO_PD),
    "speculative_algorithm": Missing(
        "this build has no such drafter; use NEXTN, DFLASH, DSPARK or NGRAM",
        values=("EAGLE3", "STANDALONE"),
    ),
    "speculative_draft_model_quantization": Missing(
        "a draft's config.json says how its weights are stored; leave it out"
    ),
    "enable_unified_memory": Missing(
        "KV and recurrent state have separate pools in this build; leave it out and use "
        "--mamba-full-memory-ratio to divide the memory"
    ),
    "enable_linear_replayssm": Missing("this build writes states back at every step; leave it out"),
    "linear_replayssm_cache_len": Missing(
        "this build writes states back at every step; leave it out"
    ),
    "enable_linear_replayssm_spec": Missing(
        "use --enable-linear-lossless-verify, which needs as little memory and is bit-exact"
    ),
    "linear_lossless_commit": Missing("accepted tuples are folded in at once; leave it out"),
    "enable_mixed_chunk": Missing(
        "prompts and decode steps run in calls of their own; leave it out"
    ),
    "attention_backend": Missing(_NO_FLASHINFER, values=("flashinfer",)),
    "linear_attn_backend": Missing(_NO_FLASHINFER, values=("flashinfer",)),
    "linear_attn_decode_backend": Missing(_NO_FLASHINFER, values=("flashinfer",)),
    "linear_attn_prefill_backend": Missing(_NO_FLASHINFER, values=("flashinfer",)),
    "linear_attn_verify_backend": Missing(_NO_FLASHINFER, values=("flashinfer",)),
    "device": Missing("this engine runs on cuda and cpu", values=("xpu", "npu")),
}


NOT_TOGETHER_IN_THIS_BUILD: tuple[MissingTogether, ...] = (
    MissingTogether(
        lambda a: a.speculative_algorithm == "DSPARK" and a.speculative_draft_model_path is None,
        "--speculative-algorithm DSPARK: drafter layers inside the target's checkpoint are not read "
        "by this build; give --speculative-draft-model-path",
    ),
)


def is_offered(flag: Flag) -> bool:
    """Whether any value of the flag beside its default can work in this build."""
    missing = NOT_IN_THIS_BUILD.get(flag.name)
    return missing is None or bool(missing.values)


def offered_choices(flag: Flag) -> tuple[str, ...]:
    """The choices of a flag that can work in this build."""
    missing = NOT_IN_THIS_BUILD.get(flag.name)
    if missing is None:
        return flag.spec.choices
    return tuple(c for c in flag.spec.choices if not missing.applies_to(c, flag.default))


def refuse_what_is_not_in_this_build(server_args: ServerArgs) -> None:
    """Raise a ValueError that names the first argument asking for something missing."""
    for flag in server_args.flags():
        missing = NOT_IN_THIS_BUILD.get(flag.name)
        value = server_args.__dict__[flag.name]
        if missing is not None and missing.applies_to(value, flag.default):
            shown = spell(flag.name) if value is True else f"{spell(flag.name)} {value}"
            raise ValueError(f"{shown}: {missing.sentence}")
    for together in NOT_TOGETHER_IN_THIS_BUILD:
        if together.asked(server_args):
            raise ValueError(together.sentence)
