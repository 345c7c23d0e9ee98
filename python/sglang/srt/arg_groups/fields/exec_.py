"""Arguments about how the model is executed, in the namespaces that `get_exec()` offers."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.arg_groups.flag import flag

MOST_GRAPH_BATCH = 1 << 16
LINEAR_ATTN_BACKENDS = ("triton", "flashinfer", "torch_native")


@dataclass
class KernelFields:
    """Which kernels run, and whether graphs of them are captured."""

    attention_backend: str | None = flag(
        None,
        "Kernels of the full-attention layers.",
        choices=("triton", "flashinfer", "torch_native"),
        auto="triton on a GPU, torch_native on the CPU",
    )
    disable_cuda_graph: bool = flag(False, "Launch every kernel one by one.")
    cuda_graph_max_bs: int | None = flag(
        None,
        "Largest batch for which a graph is captured.",
        minimum=1,
        maximum=MOST_GRAPH_BATCH,
        auto="the largest number of running requests, at most 256",
    )
    cuda_graph_bs: list[int] | None = flag(
        None,
        "Batch sizes for which graphs are captured; steps are padded to them, with graphs or without.",
        minimum=1,
        maximum=MOST_GRAPH_BATCH,
        metavar="N",
        auto="a few up to --cuda-graph-max-bs",
    )


@dataclass
class MambaFields:
    """Recurrent (Gated DeltaNet) layers: kernels, state, speculative rollback."""

    linear_attn_backend: str = flag(
        "triton",
        "Kernels of the linear-attention layers. The CPU engine has its own and takes this value "
        "as well.",
        choices=LINEAR_ATTN_BACKENDS,
    )
    linear_attn_decode_backend: str | None = flag(
        None,
        "The same for decode steps.",
        choices=LINEAR_ATTN_BACKENDS,
        auto="--linear-attn-backend",
    )
    linear_attn_prefill_backend: str | None = flag(
        None,
        "The same for prompts.",
        choices=LINEAR_ATTN_BACKENDS,
        auto="--linear-attn-backend",
    )
    linear_attn_verify_backend: str | None = flag(
        None,
        "The same for speculative verify steps.",
        choices=LINEAR_ATTN_BACKENDS,
        auto="flashinfer if decode uses it, else triton",
    )
    mamba_ssm_dtype: str | None = flag(
        None,
        "Type of the recurrent state in the pool.",
        choices=("float32", "bfloat16", "float16"),
        auto="what the model's config says, else float32",
    )
    max_mamba_cache_size: int | None = flag(
        None, "Recurrent states in the pool.", minimum=1, auto="what fits"
    )
    mamba_full_memory_ratio: float | None = flag(
        None,
        "Memory for recurrent states divided by memory for KV.",
        minimum=1e-6,
        maximum=1e6,
        auto="0.9",
    )
    mamba_radix_cache_strategy: str = flag(
        "auto",
        "How recurrent states get into the prefix cache: at the end of a request (no_buffer), or "
        "from a spare slot that is written at track boundaries (extra_buffer; the lazy form takes "
        "its second slot late).",
        choices=("auto", "no_buffer", "extra_buffer", "extra_buffer_lazy"),
        auto="extra_buffer",
    )
    mamba_track_interval: int = flag(
        256,
        "Tokens between two recurrent states that are kept for the prefix cache.",
        minimum=1,
        maximum=1 << 30,
    )
    enable_linear_replayssm: bool = flag(
        False, "Decode from a state that is written back only now and then."
    )
    linear_replayssm_cache_len: int = flag(
        16, "Steps between two write-backs of that state.", minimum=1
    )
    enable_linear_replayssm_spec: bool = flag(
        False,
        "Roll speculative steps back by folding raw inputs into a checkpoint (not bit-exact).",
    )
    enable_linear_lossless_verify: bool = flag(
        False,
        "Roll speculative steps back exactly from small update tuples instead of full snapshots of "
        "the recurrent state. Chain drafts only; the output is bit-identical to the default.",
    )
    linear_lossless_commit: str = flag(
        "immediate",
        "When accepted tuples are folded into the recurrent state: at once, or together with the "
        "following verify step (deferred).",
        choices=("immediate", "deferred"),
    )

    @property
    def enable_mamba_extra_buffer(self) -> bool:
        """Whether each request has track slots beside its working state."""
        return self.mamba_radix_cache_strategy in ("extra_buffer", "extra_buffer_lazy")

    @property
    def enable_mamba_extra_buffer_lazy(self) -> bool:
        """Whether the second track slot is taken only near a boundary."""
        return self.mamba_radix_cache_strategy == "extra_buffer_lazy"


@dataclass
class DeterministicFields:
    """Results that do not depend on what else runs."""

    enable_deterministic_inference: bool = flag(
        False,
        "Compute every row in the same order whatever else is in the batch, so that a greedy "
        "answer is the same alone, batched, speculated and resumed from the cache.",
    )
