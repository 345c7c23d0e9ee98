"""How one request wants its tokens chosen and when it wants to stop."""

from __future__ import annotations

import math
import struct
from typing import Any

import msgspec

TOP_K_ALL = 1 << 30
"""`top_k` of a request that keeps the whole vocabulary (what `-1` becomes)."""
GREEDY_TEMPERATURE = 1e-6
"""A temperature below this means greedy decoding."""
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 1024
MAX_SEED = (1 << 63) - 1
_FLOAT_FIELDS = (
    "temperature",
    "top_p",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)
_GRAMMAR_FIELDS = ("json_schema", "regex", "ebnf")


def to_float32(value: float) -> float:
    """Round to the nearest float32, so that a value widened by a router means the same here."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Options of one request, under SGLang's native names.

    Call `normalize()` once, then `verify(vocab_size)`; after both:
        temperature     float32, > 0; greedy requests have temperature 1.0 and top_k 1
        top_k           1..TOP_K_ALL
        stop            list of non-empty strings
        stop_token_ids  sorted list of ids; honoured even when `ignore_eos` is set. The front end
                        adds the model's end tokens here unless `ignore_eos` is set.
        logit_bias      {token id: float32} or None
    No token named in `stop_token_ids` and no stop string ends a request before `min_new_tokens`.
    `max_new_tokens` None means "as far as the context goes"; the front end replaces it.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    sampling_seed: int | None = None
    n: int = 1
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    logit_bias: dict[int, float] | None = None

    @property
    def is_greedy(self) -> bool:
        """True after `normalize()` if the most likely token is always taken."""
        return self.top_k == 1

    @property
    def grammar(self) -> tuple[str, str] | None:
        """(kind, text) of the constraint, kind one of `json_schema`, `regex`, `ebnf`."""
        for name, text in zip(_GRAMMAR_FIELDS, (self.json_schema, self.regex, self.ebnf)):
            if text is not None:
                return name, text
        return None

    def normalize(self) -> None:
        """Bring equal meanings to one form, in place. Idempotent; raises nothing."""
        for name in _FLOAT_FIELDS:
            setattr(self, name, to_float32(getattr(self, name)))
        if 0.0 <= self.temperature < GREEDY_TEMPERATURE:
            self.temperature = 1.0
            self.top_k = 1
        if self.top_k == -1:
            self.top_k = TOP_K_ALL
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        self.stop = list(dict.fromkeys(self.stop or []))
        self.stop_token_ids = sorted(set(self.stop_token_ids or []))
        if self.logit_bias is not None:
            self.logit_bias = {key: to_float32(value) for key, value in self.logit_bias.items()}

    def verify(self, vocab_size: int) -> None:
        """Check every bound; expects `normalize()` first.

        Raises: ValueError that starts with the field's name and gives the value and the range.
        """
        for name in _FLOAT_FIELDS:
            _check(
                math.isfinite(getattr(self, name)),
                name,
                getattr(self, name),
                "a finite number",
            )
        _check(self.temperature >= 0.0, "temperature", self.temperature, ">= 0")
        _check(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "in (0, 1]")
        _check(self.top_k >= 1, "top_k", self.top_k, "-1 (whole vocabulary) or >= 1")
        _check(0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "in [0, 1]")
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            _check(-2.0 <= value <= 2.0, name, value, "in [-2, 2]")
        _check(
            0.0 < self.repetition_penalty <= 2.0,
            "repetition_penalty",
            self.repetition_penalty,
            "in (0, 2]",
        )
        self._verify_lengths()
        self._verify_stops(vocab_size)
        self._verify_bias(vocab_size)
        given = [name for name in _GRAMMAR_FIELDS if getattr(self, name) is not None]
        _check(
            len(given) <= 1,
            given[-1] if given else "",
            given,
            "the only constraint given",
        )

    def _verify_lengths(self) -> None:
        if self.max_new_tokens is not None:
            _check(self.max_new_tokens >= 0, "max_new_tokens", self.max_new_tokens, ">= 0")
        limit = self.max_new_tokens
        _check(
            0 <= self.min_new_tokens and (limit is None or self.min_new_tokens <= limit),
            "min_new_tokens",
            self.min_new_tokens,
            f"in [0, max_new_tokens = {'the context length' if limit is None else limit}]",
        )
        _check(1 <= self.n <= 128, "n", self.n, "in [1, 128]")
        if self.sampling_seed is not None:
            low = -MAX_SEED - 1
            _check(
                low <= self.sampling_seed <= MAX_SEED,
                "sampling_seed",
                self.sampling_seed,
                "a signed 64-bit integer",
            )

    def _verify_stops(self, vocab_size: int) -> None:
        stops = self.stop if isinstance(self.stop, list) else []
        _check(
            len(stops) <= MAX_STOP_STRINGS,
            "stop",
            len(stops),
            f"<= {MAX_STOP_STRINGS} strings",
        )
        if "" in stops:
            raise ValueError(
                "stop has an empty string, which would end every answer at once; leave it out"
            )
        for text in stops:
            _check(
                len(text) <= MAX_STOP_STRING_CHARS,
                "stop",
                f"a string of {len(text)} characters",
                f"<= {MAX_STOP_STRING_CHARS} characters each",
            )
        for token_id in self.stop_token_ids or []:
            _check(
                0 <= token_id < vocab_size,
                "stop_token_ids",
                token_id,
                f"in [0, {vocab_size - 1}]",
            )
        if self.stop_regex:
            raise ValueError("stop_regex is not supported; use stop or stop_token_ids")

    def _verify_bias(self, vocab_size: int) -> None:
        for token_id, bias in (self.logit_bias or {}).items():
            if not 0 <= token_id < vocab_size:
                raise ValueError(
                    f"logit_bias has the token id {token_id}, allowed are 0 to {vocab_size - 1}"
                )
            _check(
                math.isfinite(bias) and -100.0 <= bias <= 100.0,
                "logit_bias",
                bias,
                "a number in [-100, 100]",
            )


def _check(ok: bool, name: str, value: Any, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{name} must be {allowed}, got {value!r}")
