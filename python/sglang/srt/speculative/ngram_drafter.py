"""NGRAM: drafts are copied from what followed the same words earlier, in any request of the server."""

from __future__ import annotations

from torch import Tensor

from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    LogitsOutput,
)
from sglang.srt.speculative.drafter import DraftBatch, Proposal, TokenHistory
from sglang.srt.speculative.ngram_index import NgramIndex
from sglang.srt.speculative.ngram_tree import TokenTree, frequent_tree, recent_tree
from sglang.srt.speculative.tree import NO_PARENT, DraftTree
from sglang.srt.utils.upload import upload_ids

MATCH_TYPES = {"BFS": recent_tree, "PROB": frequent_tree}
_MAX_OCCURRENCES = 32
_SPARE_SEQUENCES = 64


class NgramDrafter:
    """No model: a host-side index of prompts and outputs.

    With a greatest breadth of 1 proposals are chains, else trees. A step proposes as many rows as its
    most productive request has drafts; the others are padded.
    """

    capture_hidden = CaptureHiddenMode.NULL
    capture_layer_ids: tuple[int, ...] = ()

    def __init__(
        self,
        index: NgramIndex,
        *,
        draft_token_num: int,
        min_breadth: int,
        max_breadth: int,
        match_type: str,
    ) -> None:
        self._index = index
        self._low, self._high = min_breadth, max_breadth
        self._build = MATCH_TYPES[match_type]
        self._sequence_of: dict[str, int] = {}
        self._current: list[str] = []
        self.draft_token_num = draft_token_num
        self.is_chain = max_breadth == 1

    def propose(self, batch: DraftBatch) -> Proposal:
        self._current = [history.rid for history in batch.histories]
        trees = [self._draft(history) for history in batch.histories]
        self._drop_finished()
        width = max(len(tree.tokens) for tree in trees)
        tokens = [tree.tokens + [0] * (width - len(tree.tokens)) for tree in trees]
        drafts = upload_ids(tokens, batch.bonus.device)
        drafts = drafts.view(len(trees), width)
        if self.is_chain or width == 0:
            return Proposal(tokens=drafts)
        parents = tuple(
            (NO_PARENT, *tree.parents, *[NO_PARENT] * (width - len(tree.parents))) for tree in trees
        )
        return Proposal(tokens=drafts, tree=DraftTree(parents))

    def after_prefill(self, fb: ForwardBatch, output: LogitsOutput, next_ids: Tensor) -> None:
        """Nothing: a prompt is indexed as a whole when its request first drafts."""

    def after_verify(
        self, fb: ForwardBatch, output: LogitsOutput, targets: Tensor, num_correct: list[int]
    ) -> None:
        """Index what was accepted, so that even a request's last tokens serve later ones.

        A request whose text the prompts of this very step have pushed out of the index is left to the
        next ``propose``, which adds it again.
        """
        for rid, own, count in zip(self._current, targets.tolist(), num_correct, strict=True):
            sequence = self._sequence_of[rid]
            if self._index.length(sequence):
                self._index.append(sequence, own[: count + 1])

    def _draft(self, history: TokenHistory) -> TokenTree:
        sequence = self._synchronise(history)
        width = self.draft_token_num - 1
        occurrences = self._index.lookup(sequence, width=width, limit=_MAX_OCCURRENCES)
        return self._build(
            occurrences,
            max_nodes=width,
            max_depth=self._index.max_depth,
            low=self._low,
            high=self._high,
        )

    def _synchronise(self, history: TokenHistory) -> int:
        """The request's sequence, with every token the request has."""
        total = len(history.prompt_ids) + len(history.output_ids)
        sequence = self._sequence_of.get(history.rid)
        known = 0 if sequence is None else self._index.length(sequence)
        if sequence is None or known > total or known == 0:
            sequence = self._sequence_of[history.rid] = self._index.open_sequence()
            known = 0
        if known < total:
            prompt_len = len(history.prompt_ids)
            missing = list(history.prompt_ids[known:]) if known < prompt_len else []
            missing += history.output_ids[max(0, known - prompt_len) :]
            self._index.append(sequence, missing)
        return sequence

    def _drop_finished(self) -> None:
        if len(self._sequence_of) > len(self._current) + _SPARE_SEQUENCES:
            self._sequence_of = {rid: self._sequence_of[rid] for rid in self._current}
