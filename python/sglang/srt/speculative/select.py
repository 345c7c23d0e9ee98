"""Choose the accept rule from the server's arguments."""

from __future__ import annotations

from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.accept_rule import (
    AcceptRule,
    BlockRule,
    MatchRule,
    RejectionRule,
    ThresholdRule,
)
from sglang.srt.speculative.simulate import SimulatedRule
from sglang.srt.speculative.simulated_info import simulated_info


def select_accept_rule(args: ServerArgs, *, draws_by_default: bool) -> AcceptRule:
    """The rule for this server.

    ``draws_by_default``: the drafter gives probabilities and is meant to be accepted by them (DFlash2,
    DSPARK); the others are matched against the target's own choice, which keeps a seed's text the
    same with and without speculation.
    Raises: ValueError if a simulated acceptance is asked for in a way that does not exist.
    """
    rule = _select_exact_rule(args, draws_by_default)
    if simulated_info():
        if args.speculative_eagle_topk > 1:
            raise ValueError(
                "SGLANG_SIMULATE_ACC_LEN works with chains; use --speculative-eagle-topk 1 (NGRAM: "
                "--speculative-ngram-max-bfs-breadth 1) or unset it"
            )
        return SimulatedRule.from_environment(rule, seed=args.random_seed)
    return rule


def _select_exact_rule(args: ServerArgs, draws_by_default: bool) -> AcceptRule:
    single = args.speculative_accept_threshold_single
    acc = args.speculative_accept_threshold_acc
    if single < 1 or acc < 1:
        if args.speculative_eagle_topk > 1:
            raise ValueError(
                "--speculative-accept-threshold-single and -acc below 1 work with chains; use "
                "--speculative-eagle-topk 1 or leave them at 1"
            )
        return ThresholdRule(single=single, acc=acc)
    if args.speculative_use_block_verification:
        return BlockRule()
    if args.speculative_use_rejection_sampling or draws_by_default:
        return RejectionRule()
    return MatchRule()
