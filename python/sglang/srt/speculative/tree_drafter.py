"""Trees from the MTP block (EAGLE with topk above 1).

Depth by depth each of k frontier nodes proposes its k best children; the k best of those by product
of probabilities become the next frontier. From all nodes seen, the ``D - 1`` most probable ones are
verified. Draft rows of earlier depths are computed again at each depth, so that one call with an
ancestor mask is all that the draft model's attention needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang.srt.model_executor.batch_tensors import make_forward_batch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    LogitsOutput,
)
from sglang.srt.speculative.drafter import DraftBatch, Proposal
from sglang.srt.speculative.mtp_drafter import MTPDrafter
from sglang.srt.speculative.tree import NO_PARENT, DraftTree


@dataclass
class _Rows:
    """Draft rows so far (n per request): what the draft model is called with.

    tokens, depths [R, n]; hidden [R, n, H]; mask [R, n, n], ancestors and self
    """

    tokens: Tensor
    depths: Tensor
    hidden: Tensor
    mask: Tensor

    def extended(self, tokens: Tensor, depth: int, hidden: Tensor, above: Tensor) -> _Rows:
        """With k more rows whose parent rows are ``above`` [R, k]."""
        num_requests, k = tokens.shape
        old, n = self.mask.shape[1], self.mask.shape[1] + k
        mask = self.mask.new_zeros((num_requests, n, n))
        mask[:, :old, :old] = self.mask
        index = above.unsqueeze(-1).expand(-1, -1, old)
        mask[:, old:, :old] = self.mask.gather(1, index)
        mask[:, old:, old:] = torch.eye(k, dtype=torch.bool, device=mask.device)
        return _Rows(
            torch.cat([self.tokens, tokens], dim=1),
            torch.cat([self.depths, torch.full_like(tokens, depth)], dim=1),
            torch.cat([self.hidden, hidden], dim=1),
            mask,
        )


class TreeMTPDrafter:
    """Proposals have exactly ``num_nodes`` rows; pages are reserved for the draft rows as well."""

    is_chain = False
    capture_hidden = CaptureHiddenMode.FULL
    capture_layer_ids: tuple[int, ...] = ()

    def __init__(self, inner: MTPDrafter, *, num_steps: int, topk: int, num_nodes: int) -> None:
        self._inner = inner
        self._num_steps = num_steps
        self._topk = topk
        self._num_nodes = num_nodes
        self.draft_token_num = max(num_nodes, topk * (num_steps - 1) + 1)

    def propose(self, batch: DraftBatch) -> Proposal:
        logits, hidden = self._inner.first_step(batch.rows)
        k, num_requests = self._topk, len(batch.rows)
        scores, tokens = torch.softmax(logits, dim=-1).topk(k, dim=-1)
        parents = torch.full_like(tokens, NO_PARENT)
        seen = [(tokens, scores, parents)]
        frontier = torch.arange(k, device=tokens.device).expand(num_requests, k)
        rows = _Rows(
            tokens=tokens,
            depths=torch.ones_like(tokens),
            hidden=hidden.unsqueeze(1).expand(-1, k, -1),
            mask=torch.eye(k, dtype=torch.bool, device=tokens.device).repeat(num_requests, 1, 1),
        )
        for depth in range(2, self._num_steps + 1):
            child_logits, row_hidden = self._forward(batch, rows, k)
            shares, ids = torch.softmax(child_logits, dim=-1).topk(k, dim=-1)
            child_scores = (scores.unsqueeze(-1) * shares).flatten(1)
            ids = ids.flatten(1)
            above = frontier.repeat_interleave(k, dim=1)
            start = sum(level[0].shape[1] for level in seen)
            seen.append((ids, child_scores, above))
            if depth == self._num_steps:
                break
            scores, chosen = child_scores.topk(k, dim=-1)
            frontier = chosen + start
            parent_row = chosen // k
            taken = parent_row.unsqueeze(-1).expand(-1, -1, row_hidden.shape[-1])
            rows = rows.extended(
                ids.gather(1, chosen),
                depth,
                row_hidden.gather(1, taken),
                parent_row + rows.tokens.shape[1] - k,
            )
        return self._select(seen)

    def _forward(self, batch: DraftBatch, rows: _Rows, k: int) -> tuple[Tensor, Tensor]:
        """Logits [R, k, vocab] and hidden [R, k, H] of the last k rows of every request."""
        num_requests, n = rows.tokens.shape
        last = torch.arange(n - k, n, device=rows.tokens.device)
        first = torch.arange(num_requests, device=last.device).unsqueeze(1) * n
        fb = make_forward_batch(
            ForwardMode.TARGET_VERIFY,
            req_pool=self._inner.req_pool,
            rows=batch.rows,
            prefix_lens=batch.prefix_lens,
            query_lens=[n] * num_requests,
            input_ids=rows.tokens.reshape(-1),
            logits_rows=(first + last).reshape(-1),
            spec_hidden=rows.hidden.reshape(num_requests * n, -1),
            capture_hidden=CaptureHiddenMode.LAST,
            with_state=False,
        )
        fb.positions = (fb.prefix_lens.unsqueeze(1) + rows.depths - 1).reshape(-1)
        fb.tree_mask = rows.mask
        output = self._inner.forward(fb)
        return (
            output.logits.view(num_requests, k, -1),
            output.hidden.view(num_requests, k, -1),
        )

    def _select(self, seen: list[tuple[Tensor, Tensor, Tensor]]) -> Proposal:
        """The most probable nodes, parents before children, as one tree per request."""
        tokens, scores, parents = (torch.cat(parts, dim=1) for parts in zip(*seen, strict=True))
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        chosen = order[:, : self._num_nodes - 1].sort(dim=-1).values
        table = []
        above = parents.gather(1, chosen).tolist()
        for own, own_parents in zip(chosen.tolist(), above, strict=True):
            node_of = {candidate: i + 1 for i, candidate in enumerate(own)}
            table.append((NO_PARENT, *(node_of.get(parent, 0) for parent in own_parents)))
        return Proposal(tokens=tokens.gather(1, chosen), tree=DraftTree(tuple(table)))

    def after_prefill(self, fb: ForwardBatch, output: LogitsOutput, next_ids: Tensor) -> None:
        self._inner.after_prefill(fb, output, next_ids)

    def after_verify(
        self, fb: ForwardBatch, output: LogitsOutput, targets: Tensor, num_correct: list[int]
    ) -> None:
        self._inner.after_verify(fb, output, targets, num_correct)
