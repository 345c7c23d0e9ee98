"""Names, device, types and sizes that do not depend on speculation."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from sglang.srt.utils.platform import (
    has_amd_driver,
    has_nvidia_driver,
    num_visible_gpus,
    usable_cores,
)

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

DEFAULT_PAGE_SIZE = 64
DEFAULT_CHUNK_TOKENS = {"cuda": 8192, "cpu": 512}
DEFAULT_MAX_RUNNING = {"cuda": 128, "cpu": 16}
"""Used where neither the flag nor speculative decoding sets ``--max-running-requests``."""
MAX_DEFAULT_CPU_THREADS = 8
MAX_DEFAULT_GRAPH_BATCH = 256
_KV_DTYPE_ALIASES = {"bf16": "bfloat16"}


def detect_device() -> str:
    """ "cuda" where a GPU is visible (ROCm uses the same name), else "cpu"; needs no torch."""
    return "cuda" if has_nvidia_driver() or has_amd_driver() else "cpu"


def handle_names(args: ServerArgs) -> ServerArgs:
    """Fill the names that follow from the model's path, and the seed."""
    seed = args.random_seed
    if seed is None:
        seed = secrets.randbelow(1 << 31)
        logger.info("random seed: %d (drawn; give --random-seed to repeat it)", seed)
    return replace(
        args,
        random_seed=seed,
        tokenizer_path=args.tokenizer_path or args.model_path,
        served_model_name=args.served_model_name or args.model_path,
    )


def handle_device(args: ServerArgs) -> ServerArgs:
    """Choose the device, the types that follow from it, and the number of CPU threads."""
    device = detect_device() if args.device == "auto" else args.device
    if device == "cuda" and detect_device() != "cuda":
        raise ValueError("--device cuda: no GPU is visible to this process; use --device cpu")
    _check_devices(args, device)
    dtype = args.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    if device == "cpu" and dtype == "float16":
        raise ValueError("--dtype float16 is for GPUs; on the CPU use bfloat16 or float32")
    if device == "cpu" and args.mamba_ssm_dtype == "float16":
        raise ValueError(
            "--mamba-ssm-dtype float16 is for GPUs; on the CPU use bfloat16 or float32"
        )
    kv_dtype = _KV_DTYPE_ALIASES.get(args.kv_cache_dtype, args.kv_cache_dtype)
    if kv_dtype == "auto":
        kv_dtype = dtype
    if device == "cpu" and kv_dtype == "fp8_e4m3":
        raise ValueError("--kv-cache-dtype fp8_e4m3 is for GPUs; on the CPU use bfloat16 or auto")
    threads = args.cpu_threads or _default_cpu_threads()
    return replace(args, device=device, dtype=dtype, kv_cache_dtype=kv_dtype, cpu_threads=threads)


def _check_devices(args: ServerArgs, device: str) -> None:
    """Refuse GPUs that are not there, and name what counts on the other kind of device only."""
    if device == "cpu":
        if args.base_gpu_id != 0:
            logger.warning("--base-gpu-id %d: ignored with --device cpu", args.base_gpu_id)
        cores = usable_cores()
        if args.cpu_threads is not None and args.cpu_threads > cores:
            logger.warning(
                "--cpu-threads %d: this process may use %d cores, more threads make it slower",
                args.cpu_threads,
                cores,
            )
        return
    if args.cpu_threads is not None:
        logger.warning("--cpu-threads %d: ignored with --device %s", args.cpu_threads, device)
    there, last = num_visible_gpus(), args.base_gpu_id + args.dp_size * args.tp_size
    if there is not None and last > there:
        raise ValueError(
            f"--base-gpu-id {args.base_gpu_id} with --dp-size {args.dp_size} needs {last} GPUs, "
            f"{there} are visible to this process; lower one of them"
        )


def _default_cpu_threads() -> int:
    asked = os.environ.get("OMP_NUM_THREADS", "")
    limit = int(asked) if asked.isdigit() and int(asked) > 0 else MAX_DEFAULT_CPU_THREADS
    return min(usable_cores(), limit)


def handle_page_and_chunk(args: ServerArgs) -> ServerArgs:
    """Choose the page of the KV pool and how much of a prompt one step computes."""
    page_size = args.page_size
    if page_size is None:
        keeps_full_prefixes = args.mamba_radix_cache_strategy == "no_buffer"
        page_size = 1 if keeps_full_prefixes and not args.disable_radix_cache else DEFAULT_PAGE_SIZE
    chunk = args.chunked_prefill_size
    if chunk is None:
        chunk = DEFAULT_CHUNK_TOKENS[args.device]
    if chunk == 0:
        raise ValueError(
            "--chunked-prefill-size 0 computes nothing; give a number of tokens, or -1 for prompts "
            "in one step"
        )
    return replace(args, page_size=page_size, chunked_prefill_size=chunk)


def handle_cuda_graphs(args: ServerArgs) -> ServerArgs:
    """Choose the batch sizes that graphs are captured for; none on the CPU.

    Without graphs steps are padded to the same sizes, so that graphs change no result. Sizes that are
    given and do not become graphs are named in a warning.
    """
    if args.cuda_graph_bs == []:
        raise ValueError("--cuda-graph-bs names no size; give at least one, or leave it out")
    asked = _asked_graph_sizes(args)
    if args.device == "cpu":
        if asked:
            logger.warning("%s: ignored, --device cpu captures no CUDA graphs", asked)
        return replace(args, disable_cuda_graph=True, cuda_graph_max_bs=None, cuda_graph_bs=None)
    if asked and args.disable_cuda_graph:
        logger.warning(
            "%s: --disable-cuda-graph captures no graphs; steps are only padded to these sizes",
            asked,
        )
    if args.cuda_graph_bs:
        return _with_given_sizes(args, sorted(set(args.cuda_graph_bs)))
    largest = args.cuda_graph_max_bs
    if largest is None:
        running = args.max_running_requests or DEFAULT_MAX_RUNNING[args.device]
        largest = min(running, MAX_DEFAULT_GRAPH_BATCH)
    return replace(args, cuda_graph_max_bs=largest, cuda_graph_bs=_graph_batches(largest))


def _asked_graph_sizes(args: ServerArgs) -> str:
    """The flags that give sizes, as they were written; empty if neither was."""
    words = []
    if args.cuda_graph_bs is not None:
        words.append(" ".join(["--cuda-graph-bs", *map(str, args.cuda_graph_bs)]))
    if args.cuda_graph_max_bs is not None:
        words.append(f"--cuda-graph-max-bs {args.cuda_graph_max_bs}")
    return " and ".join(words)


def _with_given_sizes(args: ServerArgs, sizes: list[int]) -> ServerArgs:
    largest = args.cuda_graph_max_bs
    if largest is not None and sizes[-1] > largest:
        raise ValueError(
            f"--cuda-graph-bs {sizes[-1]} is above --cuda-graph-max-bs {largest}; leave one of them "
            "out"
        )
    if largest is not None and sizes[-1] < largest:
        logger.warning(
            "--cuda-graph-max-bs %d becomes %d, the largest of --cuda-graph-bs", largest, sizes[-1]
        )
    return replace(args, cuda_graph_max_bs=sizes[-1], cuda_graph_bs=sizes)


def reachable_graph_sizes(sizes: Sequence[int], most_running: int) -> list[int]:
    """The sizes that steps of at most ``most_running`` requests are padded to.

    Those above can hold no fuller step than one of ``most_running``, which takes their place.
    """
    reachable = [size for size in sizes if size < most_running]
    return reachable if len(reachable) == len(sizes) else [*reachable, most_running]


def _graph_batches(largest: int) -> list[int]:
    """Dense where batches are small, so that padding costs at most a few rows."""
    usual = [1, 2, 3, 4, 6, *range(8, 64, 4), *range(64, 128, 8), *range(128, largest + 16, 16)]
    return sorted({*(size for size in usual if size < largest), largest})
