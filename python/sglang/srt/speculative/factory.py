"""Build the drafter that the server's arguments ask for."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

from sglang.srt.arg_groups.speculative_hook import MTP_ALGORITHMS
from sglang.srt.configs.draft_config import DraftConfig
from sglang.srt.configs.model_config import ModelConfig, find_config_file
from sglang.srt.environ import envs
from sglang.srt.mem_cache.memory_plan import Pools
from sglang.srt.model_executor.backends import build_attention_backend
from sglang.srt.model_executor.model_runner import DraftModelRunner, ModelRunner
from sglang.srt.models.dflash import DFlashDraftModel
from sglang.srt.models.dflash2 import DFlash2DraftModel
from sglang.srt.models.dspark import DSparkDraftModel
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.accept_rule import AcceptRule, MatchRule
from sglang.srt.speculative.adaptive import AdaptiveConfig, StepPolicy
from sglang.srt.speculative.adaptive_drafter import AdaptiveMTPDrafter
from sglang.srt.speculative.block_drafter import BlockRunner
from sglang.srt.speculative.dflash_drafter import DFlashDrafter
from sglang.srt.speculative.drafter import Drafter
from sglang.srt.speculative.dspark_drafter import DSparkDrafter
from sglang.srt.speculative.mtp_drafter import MTPDrafter
from sglang.srt.speculative.ngram_drafter import NgramDrafter
from sglang.srt.speculative.ngram_index import NgramIndex
from sglang.srt.speculative.select import select_accept_rule
from sglang.srt.speculative.tree_drafter import TreeMTPDrafter

logger = logging.getLogger(__name__)

Built = tuple[Drafter | None, AcceptRule]


def build_speculation(args: ServerArgs, runner: ModelRunner, pools: Pools) -> Built:
    """The drafter, or None, and the rule that accepts its drafts.

    Raises: ValueError if the draft checkpoint does not fit, FileNotFoundError if it is not there.
    """
    algorithm = args.speculative_algorithm
    if algorithm is None:
        return None, MatchRule()
    builders: dict[str, Callable[[ServerArgs, ModelRunner, Pools], Built]] = {
        **dict.fromkeys(MTP_ALGORITHMS, _build_mtp),
        "DFLASH": _build_block,
        "DSPARK": _build_block,
        "NGRAM": _build_ngram,
    }
    if algorithm not in builders:
        raise ValueError(
            f"--speculative-algorithm {algorithm} is not available; use one of "
            f"{', '.join(builders)}"
        )
    return builders[algorithm](args, runner, pools)


def _build_mtp(args: ServerArgs, runner: ModelRunner, pools: Pools) -> Built:
    draft_runner = DraftModelRunner(
        runner,
        _mtp_config(args, runner.model_config),
        req_pool=pools.req_pool,
        kv_pool=pools.draft_kv_pool,
        batch_invariant=args.enable_deterministic_inference,
    )
    rule = select_accept_rule(args, draws_by_default=False)
    policy = _step_policy(args)
    widest = args.speculative_num_steps if policy is None else policy.max_steps
    is_tree = args.speculative_eagle_topk > 1
    drafter = MTPDrafter(
        draft_runner,
        pools.req_pool,
        num_steps=max(widest, args.speculative_num_steps),
        draws=rule.wants_probs,
        keeps_logits=is_tree,
    )
    if is_tree:
        tree = TreeMTPDrafter(
            drafter,
            num_steps=args.speculative_num_steps,
            topk=args.speculative_eagle_topk,
            num_nodes=args.speculative_num_draft_tokens,
        )
        return tree, rule
    return (drafter if policy is None else AdaptiveMTPDrafter(drafter, policy)), rule


def _mtp_config(args: ServerArgs, target: ModelConfig) -> ModelConfig:
    """The config of the checkpoint that the MTP block comes from.

    Raises: ValueError if its block does not fit the target's hidden rows, vocabulary or KV pool.
    """
    if args.speculative_draft_model_path is None:
        return target
    draft = ModelConfig.from_path(args.speculative_draft_model_path)
    shared = ("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    wrong = [
        f"{name} {draft.__dict__[name]} instead of {target.__dict__[name]}"
        for name in shared
        if draft.__dict__[name] != target.__dict__[name]
    ]
    if wrong:
        raise ValueError(
            f"--speculative-draft-model-path {args.speculative_draft_model_path} does not fit "
            f"{target.model_path}: {', '.join(wrong)}"
        )
    return draft


def _step_policy(args: ServerArgs) -> StepPolicy | None:
    if not args.speculative_adaptive:
        return None
    if args.speculative_eagle_topk != 1:
        logger.warning(
            "--speculative-adaptive works with --speculative-eagle-topk 1, got %d; the number of "
            "steps stays %d",
            args.speculative_eagle_topk,
            args.speculative_num_steps,
        )
        return None
    config = AdaptiveConfig.load(args.speculative_adaptive_config)
    return StepPolicy(config, args.speculative_num_steps)


def _build_block(args: ServerArgs, runner: ModelRunner, pools: Pools) -> Built:
    config = DraftConfig.from_path(args.speculative_draft_model_path)
    mask_token_id = resolve_mask_token(config, args.model_path)
    model = _block_model_class(config)(
        config,
        target=runner.model,
        mask_token_id=mask_token_id,
        device=runner.device,
        dtype=runner.dtype,
        attn_backend=build_attention_backend(
            pools.req_pool,
            pools.draft_kv_pool,
            device=runner.device,
            max_step_rows=runner.max_step_rows,
            num_heads=config.num_attention_heads,
            head_dim=config.head_dim,
        ),
    )
    runner.weights.fill(model, config.model_path)
    block_runner = BlockRunner(model, req_pool=pools.req_pool, kv_pool=pools.draft_kv_pool)
    width = args.speculative_num_draft_tokens
    has_probs = isinstance(model, (DFlash2DraftModel, DSparkDraftModel))
    greedy_draft = isinstance(model, DSparkDraftModel) and envs.SGLANG_DSPARK_USE_GREEDY_DRAFT.get()
    rule = select_accept_rule(args, draws_by_default=has_probs and not greedy_draft)
    draws = rule.wants_probs and not greedy_draft
    if isinstance(model, DSparkDraftModel):
        return DSparkDrafter(block_runner, model, draft_token_num=width, draws=draws), rule
    return DFlashDrafter(block_runner, draft_token_num=width, draws=draws), rule


def _build_ngram(args: ServerArgs, runner: ModelRunner, pools: Pools) -> Built:
    index = NgramIndex(
        capacity=args.speculative_ngram_capacity, max_depth=args.speculative_ngram_max_trie_depth
    )
    drafter = NgramDrafter(
        index,
        draft_token_num=args.speculative_num_draft_tokens,
        min_breadth=args.speculative_ngram_min_bfs_breadth,
        max_breadth=args.speculative_ngram_max_bfs_breadth,
        match_type=args.speculative_ngram_match_type,
    )
    return drafter, select_accept_rule(args, draws_by_default=False)


def _block_model_class(config: DraftConfig) -> type[DFlashDraftModel]:
    if config.algorithm == "DSPARK":
        return DSparkDraftModel
    return DFlash2DraftModel if config.architecture == "DFlash2DraftModel" else DFlashDraftModel


def resolve_mask_token(config: DraftConfig, target_path: str) -> int:
    """The mask token's id: the config's, or that of its ``mask_token`` string in a tokenizer.json.

    Raises: ValueError if neither tokenizer knows the string.
    """
    if config.mask_token_id is not None:
        return config.mask_token_id
    for directory in (Path(config.model_path), find_config_file(target_path).parent):
        file = directory / "tokenizer.json"
        if not file.is_file():
            continue
        for token in json.loads(file.read_text(encoding="utf-8")).get("added_tokens", ()):
            if token["content"] == config.mask_token:
                return int(token["id"])
    raise ValueError(
        f"draft checkpoint {config.model_path!r} gives no mask_token_id, and no tokenizer.json knows "
        f"its mask_token {config.mask_token!r}; add mask_token_id to dflash_config"
    )
