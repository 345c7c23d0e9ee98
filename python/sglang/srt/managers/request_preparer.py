"""Checks one request and gives it the form that the scheduler takes."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import msgspec

from sglang.srt.managers.detokenizer_manager import DetokenizerState
from sglang.srt.managers.errors import RequestError
from sglang.srt.managers.front_end_config import FrontEndConfig
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.request_limit import RequestLimit
from sglang.srt.managers.request_state import GenerateReqInput, ReqState
from sglang.srt.managers.tokenizer import NoTokenizer, Tokenizer
from sglang.srt.sampling.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

MAX_TOP_LOGPROBS = 1024
LONG_TEXT_CHARS = 1 << 16
MAX_TOKEN_CHARS = 256
"""No token of the vocabularies served here stands for more characters; their longest have 128."""


class RequestPreparer:
    """Knows the limits of model and server; holds no request.

    `limit`: prompt and output tokens that one request can have; what the context allows until the
    scheduler has told what its pool holds.
    """

    def __init__(self, config: FrontEndConfig, tokenizer: Tokenizer | NoTokenizer) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self.limit = RequestLimit(
            config.context_length, config.context_length, config.model_context_length
        )

    def limit_prompt(self, max_req_input_len: int) -> None:
        """Take over the longest prompt that the scheduler can run."""
        tokens = min(self._config.context_length, max_req_input_len + 1)
        self.limit = replace(self.limit, tokens=tokens)

    async def encode_long_texts(self, inputs: list[GenerateReqInput]) -> None:
        """Give long texts their ids in another thread, so that streams do not wait meanwhile.

        Raises: RequestError for a text that cannot fit, without encoding it.
        """
        for obj in inputs:
            if obj.text is None or len(obj.text) < LONG_TEXT_CHARS or obj.input_ids is not None:
                continue
            at_least = len(obj.text) // MAX_TOKEN_CHARS
            if at_least > self.limit.longest_prompt and not self._config.allow_auto_truncate:
                raise self._too_long(obj, f"more than {at_least}")
            obj.input_ids = await asyncio.to_thread(self._encode, obj)

    def prepare(
        self, obj: GenerateReqInput, index: int
    ) -> tuple[ReqState, TokenizedGenerateReqInput]:
        """What the front end keeps of request number `index`, and what it sends.

        Raises: RequestError 400 naming the field, its value and what is allowed.
        """
        params = msgspec.structs.replace(obj.sampling_params, n=1)
        params.normalize()
        try:
            params.verify(self._config.vocab_size)
        except ValueError as error:
            raise _value_error(str(error), obj.field_names) from error
        input_ids = self._fit_prompt(obj, self._input_ids(obj))
        asked = params.max_new_tokens
        scoring_only = asked == 0
        if scoring_only and not (obj.echo or (obj.return_logprob and obj.logprob_start_len >= 0)):
            name = obj.field_names.get("max_new_tokens", "max_new_tokens")
            raise RequestError(
                f"{name} 0 is for scoring a prompt: ask for its logprobs or echo, or give at "
                f"least 1",
                param=name,
            )
        remaining = self.limit.tokens - len(input_ids)
        params.max_new_tokens = max(1, min(remaining if asked is None else asked, remaining))
        params.min_new_tokens = min(params.min_new_tokens, params.max_new_tokens)
        self._check_logprobs(obj, len(input_ids))
        state = ReqState(
            rid=obj.rid,
            index=index,
            prompt_ids=input_ids,
            detokenizer=self._detokenizer(params, input_ids),
            field_names=obj.field_names,
        )
        state.scoring_only = scoring_only
        state.is_probe = obj.is_probe
        if not params.ignore_eos:
            params.stop_token_ids = sorted(
                self._config.eos_token_ids.union(params.stop_token_ids or ())
            )
        message = TokenizedGenerateReqInput(
            rid=obj.rid,
            input_ids=input_ids,
            sampling_params=params,
            return_logprob=obj.return_logprob,
            logprob_start_len=obj.logprob_start_len,
            top_logprobs_num=obj.top_logprobs_num,
            token_ids_logprob=obj.token_ids_logprob,
            priority=obj.priority,
            stream=obj.stream,
            return_state_digest=obj.return_state_digest,
            grammar_after=obj.grammar_after,
        )
        return state, message

    def _detokenizer(self, params: SamplingParams, input_ids: list[int]) -> DetokenizerState:
        decoder = self._tokenizer.incremental_decoder(
            skip_special_tokens=params.skip_special_tokens, context_ids=input_ids[-8:]
        )
        stops = params.stop if isinstance(params.stop, list) else []
        return DetokenizerState(decoder, stop_strings=stops, no_stop_trim=params.no_stop_trim)

    def _input_ids(self, obj: GenerateReqInput) -> list[int]:
        if obj.input_ids is None:
            ids = self._encode(obj)
        else:
            ids = obj.input_ids
            vocab_size = self._config.vocab_size
            bad = next((i for i in ids if not 0 <= i < vocab_size), None)
            if bad is not None:
                raise RequestError(
                    f"{obj.prompt_field} has the token id {bad}, allowed are 0 to {vocab_size - 1}",
                    param=obj.prompt_field,
                )
        if not ids:
            raise RequestError(
                f"{obj.prompt_field} is empty: at least one token is needed",
                param=obj.prompt_field,
            )
        return ids

    def _encode(self, obj: GenerateReqInput) -> list[int]:
        try:
            return self._tokenizer.encode(obj.text or "", add_special_tokens=obj.add_special_tokens)
        except ValueError as error:
            raise RequestError(str(error), param=obj.prompt_field) from error

    def _fit_prompt(self, obj: GenerateReqInput, ids: list[int]) -> list[int]:
        longest = self.limit.longest_prompt
        if len(ids) <= longest:
            return ids
        if self._config.allow_auto_truncate:
            logger.warning("rid %r: prompt of %d cut to %d tokens", obj.rid, len(ids), longest)
            return ids[-longest:]
        raise self._too_long(obj, str(len(ids)))

    def _too_long(self, obj: GenerateReqInput, how_many: str) -> RequestError:
        return RequestError(
            self.limit.refusal(obj.prompt_field, how_many),
            param=obj.prompt_field,
            code="context_length_exceeded",
        )

    def _check_logprobs(self, obj: GenerateReqInput, num_prompt: int) -> None:
        if obj.top_logprobs_num < 0 or obj.top_logprobs_num > min(
            self._config.vocab_size, MAX_TOP_LOGPROBS
        ):
            raise RequestError(
                f"top_logprobs_num must be in [0, {MAX_TOP_LOGPROBS}], got {obj.top_logprobs_num}",
                param=obj.field_names.get("top_logprobs_num", "top_logprobs_num"),
            )
        if obj.return_logprob and not -1 <= obj.logprob_start_len < num_prompt:
            raise RequestError(
                f"logprob_start_len must be in [-1, {num_prompt - 1}], got {obj.logprob_start_len}",
                param="logprob_start_len",
            )
        for token_id in obj.token_ids_logprob or ():
            if not 0 <= token_id < self._config.vocab_size:
                raise RequestError(
                    f"token_ids_logprob must be in [0, {self._config.vocab_size - 1}], got "
                    f"{token_id}",
                    param="token_ids_logprob",
                )


def _value_error(text: str, field_names: dict[str, str]) -> RequestError:
    """`text` begins with the native name of the field at fault."""
    native, _, rest = text.partition(" ")
    name = field_names.get(native, native)
    return RequestError(f"{name} {rest}", param=name)
