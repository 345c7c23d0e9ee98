"""Build a scheduler and everything below it from resolved server arguments."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from sglang.bundled import resolve_model_path
from sglang.srt.arg_groups.basic_hook import reachable_graph_sizes
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.constrained.compiler import GrammarCompiler
from sglang.srt.layers.attention.linear.utils import select_linear_attn_backends
from sglang.srt.managers.request_factory import RequestFactory
from sglang.srt.managers.request_limit import RequestLimit
from sglang.srt.managers.schedule_policy import PrefillPolicy
from sglang.srt.managers.scheduler import Scheduler, Send
from sglang.srt.managers.scheduler_metrics import SchedulerMetrics
from sglang.srt.managers.tokenizer import Tokenizer
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.mem_cache.device_memory import memory_at_hand
from sglang.srt.mem_cache.hicache.build import HostTierSettings, build_host_tier
from sglang.srt.mem_cache.hierarchical_cache import HierarchicalCache
from sglang.srt.mem_cache.memory_plan import (
    MemoryPlan,
    Pools,
    build_pools,
    check_allocated,
    make_plan,
)
from sglang.srt.mem_cache.plan_inputs import MemoryPlanError
from sglang.srt.mem_cache.plan_table import human_bytes
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.request_memory import RequestMemory
from sglang.srt.mem_cache.request_slots import RequestSlots
from sglang.srt.mem_cache.track import TrackGrids, TrackPolicy
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_loader.loader import WeightSource
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.factory import build_speculation
from sglang.srt.speculative.simulated_info import simulated_info

logger = logging.getLogger(__name__)

UNLIMITED_CHUNK_TOKENS = 1 << 30
LEAST_REQUEST_TOKENS = 2


@dataclass
class BuiltEngine:
    """The parts of a running engine, top down."""

    scheduler: Scheduler
    worker: TpModelWorker
    runner: ModelRunner
    memory: RequestMemory
    pools: Pools
    plan: MemoryPlan
    info: dict
    host_tier: HierarchicalCache | None
    grammars: GrammarCompiler

    def close(self) -> None:
        """Finish writes of the host tier; nothing runs afterwards."""
        if self.host_tier is not None:
            self.host_tier.close()


def build_engine(args: ServerArgs, send: Send, *, device_steps: bool | None = None) -> BuiltEngine:
    """Plan memory, build pools, load weights, and put the scheduler on top.

    ``device_steps``: the device leads decode steps; by default on a GPU.
    """
    model_config = ModelConfig.from_path(args.model_path)
    device = torch.device(args.device)
    if device_steps is None:
        device_steps = device.type != "cpu"
    if device.type == "cpu":
        torch.set_num_threads(args.cpu_threads)
    plan = make_plan(model_config, args)
    _log_plan(plan, model_config)
    check_memory_is_there(args, plan)
    pools = build_pools(plan, device)
    check_allocated(plan, pools)
    runner = _build_runner(args, model_config, plan, pools)
    drafter, accept_rule = build_speculation(args, runner, pools)
    draft_token_num = drafter.draft_token_num if drafter else 1
    memory, policy, host = _build_memory(args, pools, draft_token_num)
    worker = TpModelWorker(
        runner,
        drafter,
        track_grid_tokens=policy.grids.track_tokens if policy else 1,
        accept_rule=accept_rule,
        device_steps=device_steps,
        graph_sizes=graph_sizes(args, plan),
    )
    if device.type == "cuda" and not args.disable_cuda_graph:
        worker.capture_graphs()
    overlap = device_steps and not args.disable_overlap_schedule
    chunk_tokens = args.chunked_prefill_size
    limit = _request_limit(plan, model_config, draft_token_num)
    info = _info(args, model_config, plan, limit)
    if drafter is not None:
        info |= {"speculative_accept_rule": accept_rule.name, **simulated_info()}
    tokenizer = _load_tokenizer(args)
    grammars = _grammars(args, model_config, tokenizer)
    metrics = SchedulerMetrics(
        memory,
        decode_log_interval=args.decode_log_interval,
        max_total_num_tokens=plan.max_total_num_tokens,
        draft_token_num=draft_token_num,
        verify_scratch_bytes=plan.verify_scratch_bytes,
        lossless_bytes_freed=plan.lossless_bytes_freed,
        is_lossless=args.enable_linear_lossless_verify,
    )
    scheduler = Scheduler(
        worker=worker,
        memory=memory,
        policy=PrefillPolicy(
            memory,
            schedule_policy=args.schedule_policy,
            chunk_tokens=chunk_tokens if chunk_tokens > 0 else UNLIMITED_CHUNK_TOKENS,
            max_prefill_tokens=args.max_prefill_tokens,
            max_running_requests=plan.max_running_requests,
            conservativeness=args.schedule_conservativeness,
            draft_token_num=draft_token_num,
        ),
        factory=RequestFactory(
            vocab_size=model_config.vocab_size,
            limit=limit,
            decode=None if tokenizer is None else tokenizer.decode,
            random_seed=args.random_seed,
            use_priority=args.enable_priority_scheduling,
            grammars=grammars,
        ),
        metrics=metrics,
        max_queued_requests=args.max_queued_requests,
        stream_interval=args.stream_interval,
        overlap=overlap,
        send=send,
        internal_state=lambda: info if host is None else info | {"hicache": host.stats()},
    )
    return BuiltEngine(scheduler, worker, runner, memory, pools, plan, info, host, grammars)


def check_memory_is_there(args: ServerArgs, plan: MemoryPlan) -> None:
    """Raise MemoryPlanError if --device-memory-gb made the plan larger than the device at hand."""
    if args.device_memory_gb is None:
        return
    needed = plan.static_bytes - plan.unspent_bytes
    there = memory_at_hand(args)
    if needed > there:
        raise MemoryPlanError(
            f"--device-memory-gb {args.device_memory_gb:g}: weights and pools of that plan need "
            f"{human_bytes(needed)}, this machine has {human_bytes(there)}; lower it or leave it out"
        )


def graph_sizes(args: ServerArgs, plan: MemoryPlan) -> list[int]:
    """The sizes of --cuda-graph-bs that steps can have; says which cannot."""
    sizes, most = args.cuda_graph_bs or [], plan.max_running_requests
    beyond = [size for size in sizes if size > most]
    if beyond:
        logger.info(
            "--cuda-graph-bs %s (up to --cuda-graph-max-bs %s): at most %d requests run at once, so "
            "%d takes the place of these sizes; raise --max-running-requests to use them",
            " ".join(map(str, beyond)),
            args.cuda_graph_max_bs,
            most,
            most,
        )
    return reachable_graph_sizes(sizes, most)


def _log_plan(plan: MemoryPlan, model_config: ModelConfig) -> None:
    for line in plan.describe().splitlines():
        logger.info(line)
    if plan.ssm_dtype != model_config.mamba_ssm_dtype:
        logger.warning(
            "recurrent state is kept in %s although the model's config names %s, so outputs may "
            "differ; leave out --mamba-ssm-dtype and SGLANG_MAMBA_SSM_DTYPE to follow the config",
            plan.ssm_dtype,
            model_config.mamba_ssm_dtype,
        )


def _build_runner(
    args: ServerArgs, model_config: ModelConfig, plan: MemoryPlan, pools: Pools
) -> ModelRunner:
    return ModelRunner(
        model_config=model_config,
        pools=pools,
        device=torch.device(args.device),
        dtype=getattr(torch, args.dtype),
        batch_invariant=args.enable_deterministic_inference,
        weights=WeightSource(args.load_format, sys.stderr.isatty()),
        max_step_rows=plan.max_running_requests * (plan.draft_tokens or 1),
        linear_backends=select_linear_attn_backends(
            args.linear_attn_backend,
            decode=args.linear_attn_decode_backend,
            prefill=args.linear_attn_prefill_backend,
            verify=args.linear_attn_verify_backend,
        ),
    )


def _request_limit(
    plan: MemoryPlan, model_config: ModelConfig, draft_token_num: int
) -> RequestLimit:
    """The largest request.

    Raises: MemoryPlanError if the pool has no room for a prompt and an output token.
    """
    if plan.largest_request_tokens < LEAST_REQUEST_TOKENS:
        raise MemoryPlanError(
            f"a KV cache of {plan.max_total_num_tokens} tokens serves nobody: a prompt token, an "
            f"output token and {draft_token_num} rows of a step need "
            f"{draft_token_num + LEAST_REQUEST_TOKENS}; raise --max-total-tokens or "
            "--mem-fraction-static"
        )
    return RequestLimit(
        plan.largest_request_tokens, plan.context_length, model_config.max_position_embeddings
    )


def _build_memory(
    args: ServerArgs, pools: Pools, draft_token_num: int
) -> tuple[RequestMemory, TrackPolicy | None, HierarchicalCache | None]:
    if args.disable_radix_cache:
        policy, tree = None, None
    else:
        policy = TrackPolicy.resolve(
            strategy=args.mamba_radix_cache_strategy,
            grids=TrackGrids.resolve(
                page_size=args.page_size, track_interval=args.mamba_track_interval
            ),
            overlap_schedule=not args.disable_overlap_schedule,
            max_step_tokens=draft_token_num,
        )
        tree = RadixCache(
            page_size=args.page_size,
            checkpoint_tokens=policy.grids.checkpoint_tokens,
            needs_state=True,
            free_kv=pools.token_allocator.free,
            free_state=pools.req_pool.mamba_allocator.free,
        )
    host = _build_host_tier(args, pools, tree) if args.enable_hierarchical_cache else None
    slots = RequestSlots(pools.req_pool)
    memory = RequestMemory(
        slots=slots, allocator=pools.token_allocator, tree=tree, policy=policy, host=host
    )
    return memory, policy, host


def _build_host_tier(args: ServerArgs, pools: Pools, tree: RadixCache) -> HierarchicalCache:
    storage_dir = None
    if args.hicache_storage_backend == "file":
        default = Path.home() / ".cache" / "sglang-lossless" / "hicache"
        storage_dir = Path(args.hicache_storage_dir or default)
    folder = Path(resolve_model_path(args.model_path))
    folders = [folder]
    if args.speculative_draft_model_path is not None:
        folders.append(Path(resolve_model_path(args.speculative_draft_model_path)))
    drafts = [pools.draft_kv_pool] if pools.draft_kv_pool is not None else []
    return build_host_tier(
        tree=tree,
        kv_pools=[pools.kv_pool, *drafts],
        mamba_pool=pools.req_pool.mamba_pool,
        settings=HostTierSettings(
            ratio=args.hicache_ratio,
            size_gb=args.hicache_size,
            write_policy=args.hicache_write_policy,
            storage_dir=storage_dir,
            identity={
                "config": (folder / "config.json").read_text(),
                "dtype": args.dtype,
                "draft": args.speculative_draft_model_path,
                "algorithm": args.speculative_algorithm,
            },
            weight_files=[file for one in folders for file in sorted(one.glob("*.safetensors"))],
        ),
    )


def _load_tokenizer(args: ServerArgs) -> Tokenizer | None:
    """For stop strings and grammars; None on a server without one."""
    if args.skip_tokenizer_init:
        return None
    return Tokenizer(resolve_model_path(args.tokenizer_path))


def _grammars(
    args: ServerArgs, model_config: ModelConfig, tokenizer: Tokenizer | None
) -> GrammarCompiler:
    refusal = None
    if args.grammar_backend == "none":
        refusal = (
            "this server was started with --grammar-backend none, which refuses constrained "
            "decoding; start it without"
        )
    elif simulated_info():
        refusal = "simulated acceptance emits tokens that no grammar allowed; run without it"
    end_ids = set(model_config.eos_token_ids)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        end_ids.add(tokenizer.eos_token_id)
    return GrammarCompiler(
        tokenizer, vocab_size=model_config.vocab_size, end_ids=end_ids, refusal=refusal
    )


def _info(
    args: ServerArgs,
    model_config: ModelConfig,
    plan: MemoryPlan,
    limit: RequestLimit,
) -> dict:
    """Effective sizes, JSON-compatible; known from start to end."""
    return {
        "max_req_input_len": limit.longest_prompt,
        "max_req_len": limit.tokens,
        "max_total_num_tokens": plan.max_total_num_tokens,
        "max_running_requests": plan.max_running_requests,
        "context_length": limit.tokens,
        "model_context_length": model_config.max_position_embeddings,
        "vocab_size": model_config.vocab_size,
        "dtype": args.dtype,
        "kv_cache_dtype": args.kv_cache_dtype,
        "mamba_ssm_dtype": plan.ssm_dtype,
        "num_state_slots": plan.num_state_slots,
        "verify_scratch_bytes": plan.verify_scratch_bytes,
        "lossless_bytes_freed": plan.lossless_bytes_freed,
        "lossless_verify": args.enable_linear_lossless_verify,
        "device": args.device,
        "device_memory_gb": args.device_memory_gb,
        "memory_plan": plan.to_dict(),
    }
