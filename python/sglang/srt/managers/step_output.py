"""What every kind of step does with logits: edits before a choice, log probabilities after it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sglang.srt.constrained.bitmask import forbid
from sglang.srt.layers.sampler import sample, token_logprobs
from sglang.srt.managers.io_struct import TokenLogprob
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_batch import SamplingBatch
from sglang.srt.speculative.accept_rule import AcceptRule, Verdict, VerifyRows
from sglang.srt.speculative.drafter import Proposal
from sglang.srt.utils.upload import upload_ids


def sample_next(reqs: Sequence[Req], logits: Tensor) -> Tensor:
    """Edit logits [R, vocab] in place, then choose a token per request. Returns [R] int64."""
    for i, req in enumerate(reqs):
        if req.edits_logits:
            req.sampling.edit_logits(logits[i : i + 1], req.output_ids, ())
        if req.grammar is not None:
            forbid(logits[i : i + 1], req.grammar.mask_chain(()))
    batch = SamplingBatch.build(
        [r.sampling for r in reqs], [r.num_tokens for r in reqs], 1, logits.device
    )
    return sample(logits, batch)


def edit_and_accept(
    rule: AcceptRule, reqs: Sequence[Req], candidates: Tensor, logits: Tensor, proposal: Proposal
) -> Verdict:
    """Edit logits [R * D, vocab] in place, then decide which of candidates [R, D] are kept."""
    edit_verify_logits(reqs, logits, proposal)
    return rule.accept(
        VerifyRows(
            candidates=candidates,
            logits=logits,
            states=[r.sampling for r in reqs],
            positions=[r.num_tokens for r in reqs],
            proposal=proposal,
        )
    )


def edit_verify_logits(reqs: Sequence[Req], logits: Tensor, proposal: Proposal) -> None:
    """Penalties, bias, minimum length and grammar, each row after the drafts that lead to it.

    Waits for the device if any request wants edits, because they follow from token ids.
    """
    tree, width = proposal.tree, proposal.tokens.shape[1] + 1
    for i, req in enumerate(reqs):
        if not req.edits_logits:
            continue
        drafts = proposal.tokens[i].tolist()
        own = logits[i * width : (i + 1) * width]
        if tree is None:
            req.sampling.edit_logits(own, req.output_ids, drafts)
            if req.grammar is not None:
                forbid(own, req.grammar.mask_chain(drafts))
            continue
        paths = [[drafts[n - 1] for n in tree.path_to(i, node)[1:]] for node in range(width)]
        for node, ahead in enumerate(paths):
            req.sampling.edit_logits(own[node : node + 1], req.output_ids + ahead, ())
        if req.grammar is not None:
            forbid(own, req.grammar.mask_tree(paths))


def unedited(reqs: Sequence[Req], logits: Tensor) -> Tensor:
    """The logits to report log probabilities from: a copy if somebody asks for them."""
    return logits.clone() if any(r.return_logprob for r in reqs) else logits


def output_logprobs(req: Req, logits: Tensor, ids: list[int]) -> list[TokenLogprob] | None:
    """Of ``ids`` under logits [len(ids), vocab], or None if the request does not ask."""
    if not req.return_logprob:
        return None
    rows = token_logprobs(
        logits, upload_ids(ids, logits.device), req.top_logprobs_num, req.token_ids_logprob
    )
    return [
        TokenLogprob(logprob=own, token_id=token, top=top, selected=named)
        for token, (own, top, named) in zip(ids, rows, strict=True)
    ]
