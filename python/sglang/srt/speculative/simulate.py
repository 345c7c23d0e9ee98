"""Pretended acceptance, for benchmarks on random weights. Its outputs are not the model's."""

from __future__ import annotations

import logging
import random
from enum import Enum

import torch
from torch import Tensor

from sglang.kernels.ops.fused.argmax import argmax_rows
from sglang.srt.environ import envs
from sglang.srt.speculative.accept_rule import AcceptRule, Verdict, VerifyRows
from sglang.srt.utils.upload import upload_ids

logger = logging.getLogger(__name__)

FIXED_TOKEN_ID = 100


class Method(Enum):
    """How a step's accept length is drawn around the wanted mean."""

    MATCH_EXPECTED = "match-expected"
    MULTINOMIAL = "multinomial"


class TokenMode(Enum):
    """What is emitted: one fixed id, or the drafts and then the target's best token."""

    FIXED = "fixed"
    REAL_DRAFT_TOKEN = "real-draft-token"


class SimulatedRule:
    """Replaces every request's accepted length by a random one with mean ``accept_len``.

    ``accept_len`` counts the bonus, like every accept length, and is clamped to 1 .. D. Requests draw
    independently in every step. Commit, KV and drafts follow the pretended length. Chains only.
    """

    def __init__(
        self,
        inner: AcceptRule,
        *,
        accept_len: float,
        method: Method,
        token_mode: TokenMode,
        seed: int | None,
    ) -> None:
        self.name = f"simulated({inner.name})"
        self.wants_probs = inner.wants_probs
        self.reads_sampling = False
        self._accept_len = accept_len
        self._method = method
        self._token_mode = token_mode
        self._random = random.Random(seed)

    @classmethod
    def from_environment(cls, inner: AcceptRule, *, seed: int | None) -> SimulatedRule:
        """Read SGLANG_SIMULATE_ACC_LEN, _METHOD and _TOKEN_MODE; ValueError names a bad value."""
        rule = cls(
            inner,
            accept_len=envs.SGLANG_SIMULATE_ACC_LEN.get(),
            method=_member(
                Method, "SGLANG_SIMULATE_ACC_METHOD", envs.SGLANG_SIMULATE_ACC_METHOD.get()
            ),
            token_mode=_member(
                TokenMode,
                "SGLANG_SIMULATE_ACC_TOKEN_MODE",
                envs.SGLANG_SIMULATE_ACC_TOKEN_MODE.get(),
            ),
            seed=seed,
        )
        logger.warning(
            "SGLANG_SIMULATE_ACC_LEN=%s: acceptance is pretended, outputs are not the model's",
            rule._accept_len,
        )
        return rule

    def accept(self, rows: VerifyRows) -> Verdict:
        width, device = rows.width, rows.candidates.device
        lengths = [self.draw_length(width) for _ in rows.states]
        correct = upload_ids(lengths, device) - 1
        targets = self._tokens(rows)
        if self._token_mode is TokenMode.REAL_DRAFT_TOKEN:
            is_draft = torch.arange(width - 1, device=device) < correct.unsqueeze(1)
            drafts = rows.candidates[:, 1:]
            targets[:, :-1] = torch.where(is_draft, drafts, targets[:, :-1])
        return Verdict(correct, targets)

    def draw_length(self, width: int) -> int:
        """Accept length of a step, 1 .. width."""
        mean = min(max(self._accept_len, 1.0), float(width))
        if self._method is Method.MULTINOMIAL:
            length = round(self._random.gauss(mean, 1.0))
        else:
            low = int(mean)
            length = low + (self._random.random() < mean - low)
        return min(max(length, 1), width)

    def _tokens(self, rows: VerifyRows) -> Tensor:
        if self._token_mode is TokenMode.FIXED:
            return torch.full_like(rows.candidates, FIXED_TOKEN_ID)
        return argmax_rows(rows.logits).view(rows.candidates.shape)


def _member(kind: type[Enum], variable: str, value: str) -> Enum:
    names = [member.value for member in kind]
    if value not in names:
        raise ValueError(f"{variable}={value!r}; use one of {', '.join(names)}")
    return kind(value)
