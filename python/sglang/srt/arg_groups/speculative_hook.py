"""The numbers of speculative decoding: any subset starts with shown defaults or is refused by name."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from sglang.srt.arg_groups.flag import spell
from sglang.srt.configs.draft_config import DraftConfig
from sglang.srt.configs.model_config import find_config_file, read_json
from sglang.srt.speculative.adaptive import AdaptiveConfig

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

MTP_ALGORITHMS = ("EAGLE", "NEXTN")
EAGLE_FAMILY = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
BLOCK_ALGORITHMS = ("DFLASH", "DSPARK")

DEFAULT_NUM_STEPS = 3
DEFAULT_NGRAM_DRAFT_TOKENS = 12
DEFAULT_DFLASH_BLOCK_SIZE = 16
DEFAULT_DSPARK_BLOCK_SIZE = 7
MAX_RUNNING_WITH_SPECULATION = 48

_FLAGS_OF = {
    "speculative_ngram_": ("NGRAM",),
    "speculative_dflash_": ("DFLASH",),
    "speculative_dspark_": ("DSPARK",),
    "speculative_draft_model_path": (*EAGLE_FAMILY, *BLOCK_ALGORITHMS),
}
"""Beginnings of names of flags, and the algorithms whose drafters read them."""
_NUMBERS = (
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
)


def effective_topk(args: ServerArgs) -> int | None:
    """Candidates per depth that the server will draft with; None without an algorithm.

    Works before and after resolution: DFLASH and DSPARK always draft one chain.
    """
    if args.speculative_algorithm is None:
        return None
    if args.speculative_algorithm in BLOCK_ALGORITHMS:
        return 1
    if args.speculative_algorithm == "NGRAM":
        return args.speculative_ngram_max_bfs_breadth
    return 1 if args.speculative_eagle_topk is None else args.speculative_eagle_topk


def handle_speculative_decoding(args: ServerArgs) -> ServerArgs:
    """Decide steps, candidates and verify rows, and the number of running requests."""
    if args.speculative_algorithm is None:
        _refuse_numbers_without_algorithm(args)
        return args
    _refuse_numbers_of_others(args)
    args = _handle_adaptive(args)
    if args.speculative_algorithm in EAGLE_FAMILY:
        args = _handle_eagle(args)
    elif args.speculative_algorithm in BLOCK_ALGORITHMS:
        args = _handle_block(args)
    else:
        args = _handle_ngram(args)
    _check_accept_rules(args)
    if args.max_running_requests is None:
        args = replace(args, max_running_requests=MAX_RUNNING_WITH_SPECULATION)
    logger.info(
        "speculative decoding: %s, %d steps, topk %d, %d verify rows per request",
        args.speculative_algorithm,
        args.speculative_num_steps,
        args.speculative_eagle_topk,
        args.speculative_num_draft_tokens,
    )
    return args


def _refuse_numbers_without_algorithm(args: ServerArgs) -> None:
    for flag in args.flags():
        value = args.__dict__[flag.name]
        if flag.name.startswith("speculative_") and value != flag.default:
            shown = flag.spelling if value is True else f"{flag.spelling} {value}"
            raise ValueError(f"{shown} needs --speculative-algorithm; give one or leave it out")


def _refuse_numbers_of_others(args: ServerArgs) -> None:
    """Raise a ValueError for a flag that only drafters of other algorithms read."""
    for flag in args.flags():
        owners = [(start, who) for start, who in _FLAGS_OF.items() if flag.name.startswith(start)]
        value = args.__dict__[flag.name]
        for _, algorithms in owners:
            if value != flag.default and args.speculative_algorithm not in algorithms:
                raise ValueError(
                    f"{flag.spelling} {value} is for --speculative-algorithm "
                    f"{' or '.join(algorithms)}, got {args.speculative_algorithm}; leave it out"
                )


def _handle_adaptive(args: ServerArgs) -> ServerArgs:
    """Choose the steps to start with; an unsupported combination falls back to fixed steps."""
    if not args.speculative_adaptive:
        if args.speculative_adaptive_config is not None:
            raise ValueError("--speculative-adaptive-config needs --speculative-adaptive")
        return args
    topk = effective_topk(args)
    if args.speculative_algorithm not in ("EAGLE", "EAGLE3", "NEXTN") or topk != 1:
        logger.warning(
            "--speculative-adaptive works with chains of EAGLE, EAGLE3 or NEXTN, not with %s and "
            "--speculative-eagle-topk %s; the number of steps is fixed",
            args.speculative_algorithm,
            topk,
        )
        return replace(args, speculative_adaptive=False, speculative_adaptive_config=None)
    candidates = AdaptiveConfig.load(args.speculative_adaptive_config).union
    steps = args.speculative_num_steps
    if steps is None:
        steps = max(1, candidates[len(candidates) // 2])
    elif steps not in candidates:
        raise ValueError(
            f"--speculative-num-steps {steps} is not among the candidate steps {list(candidates)} "
            "of --speculative-adaptive; use one of them"
        )
    return replace(args, speculative_num_steps=steps)


def _handle_eagle(args: ServerArgs) -> ServerArgs:
    steps = args.speculative_num_steps
    topk = args.speculative_eagle_topk
    rows = args.speculative_num_draft_tokens
    if steps is None:
        for name in _NUMBERS[1:]:
            value = args.__dict__[name]
            if value is not None:
                raise ValueError(
                    f"{spell(name)} {value} needs --speculative-num-steps beside it; give both, or "
                    f"neither for the default 3 / 1 / 4"
                )
        steps = DEFAULT_NUM_STEPS
    topk = 1 if topk is None else topk
    if topk == 1:
        if rows is not None and rows != steps + 1:
            logger.warning(
                "--speculative-num-draft-tokens %d becomes %d: a chain (--speculative-eagle-topk 1) "
                "has one verify row more than --speculative-num-steps %d",
                rows,
                steps + 1,
                steps,
            )
        rows = steps + 1
    else:
        rows = _tree_rows(steps, topk, rows)
    return replace(
        args,
        speculative_num_steps=steps,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=rows,
    )


def _tree_rows(steps: int, topk: int, rows: int | None) -> int:
    largest = 1 + topk + topk * topk * (steps - 1)
    if rows is None:
        raise ValueError(
            f"--speculative-eagle-topk {topk} drafts a tree and needs "
            f"--speculative-num-draft-tokens between {steps + 1} and {largest}"
        )
    if not steps + 1 <= rows <= largest:
        raise ValueError(
            f"--speculative-num-draft-tokens {rows} does not fit --speculative-num-steps {steps} "
            f"and --speculative-eagle-topk {topk}; give {steps + 1} to {largest}"
        )
    return rows


def _handle_block(args: ServerArgs) -> ServerArgs:
    for name in _NUMBERS[:2]:
        value = args.__dict__[name]
        if value not in (None, 1):
            logger.warning(
                "%s %d becomes 1: %s drafts one chain in one pass",
                spell(name),
                value,
                args.speculative_algorithm,
            )
    rows = _dflash_rows(args) if args.speculative_algorithm == "DFLASH" else _dspark_rows(args)
    return replace(
        args,
        speculative_num_steps=1,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=rows,
    )


def _one_width(args: ServerArgs, flag_name: str, extra_rows: int) -> int | None:
    """The verify rows that the user asked for through either flag; None if through neither."""
    block = args.__dict__[flag_name]
    rows = args.speculative_num_draft_tokens
    if block is None:
        return rows
    if rows is not None and rows != block + extra_rows:
        raise ValueError(
            f"{spell(flag_name)} {block} means {block + extra_rows} verify rows, but "
            f"--speculative-num-draft-tokens is {rows}; leave one of them out"
        )
    return int(block) + extra_rows


def _dflash_rows(args: ServerArgs) -> int:
    if args.speculative_draft_model_path is None:
        raise ValueError("--speculative-algorithm DFLASH needs --speculative-draft-model-path")
    trained = DraftConfig.from_path(args.speculative_draft_model_path).block_size
    asked = _one_width(args, "speculative_dflash_block_size", 0)
    return _check_width(args, asked, trained or DEFAULT_DFLASH_BLOCK_SIZE)


def _dspark_rows(args: ServerArgs) -> int:
    asked = _one_width(args, "speculative_dspark_block_size", 1)
    return _check_width(args, asked, _dspark_block_size(args) + 1)


def _dspark_block_size(args: ServerArgs) -> int:
    if args.speculative_draft_model_path is not None:
        trained = DraftConfig.from_path(args.speculative_draft_model_path).block_size
        return trained or DEFAULT_DSPARK_BLOCK_SIZE
    bundled = read_json(find_config_file(args.model_path)).get("dspark_block_size")
    if bundled is None:
        raise ValueError(
            "--speculative-algorithm DSPARK needs --speculative-draft-model-path: "
            f"{args.model_path} carries no DSPARK layers of its own"
        )
    return int(bundled)


def _check_width(args: ServerArgs, asked: int | None, trained: int) -> int:
    if asked is None:
        return trained
    if asked != trained:
        logger.warning(
            "%s verifies %d rows, the drafter was trained for %d; fewer tokens will be accepted",
            args.speculative_algorithm,
            asked,
            trained,
        )
    return asked


def _handle_ngram(args: ServerArgs) -> ServerArgs:
    low, high = args.speculative_ngram_min_bfs_breadth, args.speculative_ngram_max_bfs_breadth
    if low > high:
        raise ValueError(
            f"--speculative-ngram-min-bfs-breadth {low} is above "
            f"--speculative-ngram-max-bfs-breadth {high}"
        )
    rows = args.speculative_num_draft_tokens or DEFAULT_NGRAM_DRAFT_TOKENS
    steps = max(1, rows // high)
    for name, used in (("speculative_num_steps", steps), ("speculative_eagle_topk", high)):
        value = args.__dict__[name]
        if value not in (None, used):
            logger.warning(
                "%s %d becomes %d: NGRAM derives it from --speculative-num-draft-tokens and "
                "--speculative-ngram-max-bfs-breadth",
                spell(name),
                value,
                used,
            )
    return replace(
        args,
        speculative_num_steps=steps,
        speculative_eagle_topk=high,
        speculative_num_draft_tokens=rows,
    )


def _check_accept_rules(args: ServerArgs) -> None:
    exact = args.speculative_accept_threshold_single == args.speculative_accept_threshold_acc == 1.0
    chain = args.speculative_eagle_topk == 1
    eagle = args.speculative_algorithm in ("EAGLE", "EAGLE3", "NEXTN")
    block = args.speculative_algorithm in BLOCK_ALGORITHMS
    if args.speculative_use_rejection_sampling and not (eagle and chain and exact):
        raise ValueError(
            "--speculative-use-rejection-sampling works with EAGLE, EAGLE3 or NEXTN, "
            "--speculative-eagle-topk 1 and both accept thresholds at 1; leave it out"
        )
    if args.speculative_use_block_verification and not ((eagle or block) and chain and exact):
        raise ValueError(
            "--speculative-use-block-verification works with chains of EAGLE, EAGLE3, NEXTN, DFLASH "
            "or DSPARK and both accept thresholds at 1; leave it out"
        )
