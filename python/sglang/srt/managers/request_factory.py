"""Turn a message of the front end into a Req, or say what is wrong with it."""

from __future__ import annotations

import random

from sglang.srt.constrained.compiler import GrammarCompiler
from sglang.srt.managers.finish import Decode, StopChecker
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.request_limit import RequestLimit
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_batch import SamplingState


class RequestFactory:
    """Knows the limits that a request must keep; holds no request.

    limit  prompt and output tokens that one request can have at most
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        limit: RequestLimit,
        decode: Decode | None,
        random_seed: int,
        use_priority: bool,
        grammars: GrammarCompiler,
    ) -> None:
        self._vocab_size = vocab_size
        self._limit = limit
        self._decode = decode
        self._use_priority = use_priority
        self._grammars = grammars
        self._random = random.Random(random_seed)

    def build(self, message: TokenizedGenerateReqInput) -> Req:
        """Return the request. Raises: ValueError naming the field, the value and the way out."""
        params = message.sampling_params
        num_prompt = len(message.input_ids)
        if num_prompt == 0:
            raise ValueError("input_ids: the prompt is empty; send at least one token")
        if num_prompt > self._limit.longest_prompt:
            raise ValueError(self._limit.refusal("input_ids", str(num_prompt)))
        bad = next((t for t in message.input_ids if not 0 <= t < self._vocab_size), None)
        if bad is not None:
            raise ValueError(f"input_ids: token id {bad} is outside [0, {self._vocab_size})")
        grammar = None
        if params.grammar is not None:
            grammar = self._grammars.compile(*params.grammar, start_after=message.grammar_after)
        limit = self._limit.tokens - num_prompt
        max_new_tokens = limit if params.max_new_tokens is None else params.max_new_tokens
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        stop_ids = frozenset(params.stop_token_ids or ())
        seed = params.sampling_seed
        return Req(
            rid=message.rid,
            origin_input_ids=message.input_ids,
            sampling=SamplingState(
                params=params,
                seed=self._random.getrandbits(63) if seed is None else seed,
                vocab_size=self._vocab_size,
                stop_token_ids=stop_ids,
                prompt_ids=message.input_ids,
            ),
            stop=StopChecker(
                stop_token_ids=stop_ids,
                stop_strings=params.stop or (),
                min_new_tokens=params.min_new_tokens,
                decode=self._decode,
                skip_special_tokens=params.skip_special_tokens,
            ),
            max_new_tokens=min(max_new_tokens, limit),
            priority=message.priority if self._use_priority else 0,
            return_logprob=message.return_logprob,
            logprob_start_len=message.logprob_start_len,
            top_logprobs_num=message.top_logprobs_num,
            token_ids_logprob=message.token_ids_logprob,
            return_state_digest=message.return_state_digest,
            grammar=grammar,
        )
