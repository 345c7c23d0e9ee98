"""From a request's constraint to a matcher of llguidance.

llguidance is an optional package, and its table of the vocabulary takes seconds to build for a large
one, so both wait for the first request that needs them.
"""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from sglang.srt.constrained.grammar_state import GrammarState
from sglang.srt.managers.tokenizer import Tokenizer

MAX_CACHED_GRAMMARS = 64
_WHITESPACE = r"( |\n( {0,24}|\t{0,8}))"
"""Between the tokens of JSON: one blank, or one line break and an indent. Models that like blanks
would otherwise never get to the end."""
_NEEDS_PACKAGE = (
    "constrained decoding needs the package llguidance on the server; install it with "
    "pip install 'sglang-lossless[grammar]'"
)


class GrammarCompiler:
    """Compiles constraints for one vocabulary; keeps the latest ones.

    Args:
        tokenizer: None on a server without one, which can enforce nothing.
        vocab_size: width of the model's logits, which may exceed the tokenizer's ids.
        end_ids: tokens that end a text; allowed where the grammar may end.
        refusal: why every constraint is refused on this server, or None.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        end_ids: Iterable[int],
        refusal: str | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = sorted(end_ids)
        if refusal is None and tokenizer is None:
            refusal = "constrained decoding needs a tokenizer, and this server runs without one"
        elif refusal is None and tokenizer is not None:
            backend = tokenizer.backend  # a config may name end tokens that its tokenizer lacks
            self._end_ids = [i for i in self._end_ids if backend.id_to_token(i) is not None]
            if not self._end_ids:
                refusal = "constrained decoding needs an end token that the tokenizer knows"
        self._refusal = refusal
        self._table: Any = None
        self._cache: OrderedDict[tuple[str, str], Any] = OrderedDict()

    def compile(self, kind: str, text: str, *, start_after: str | None = None) -> GrammarState:
        """State of one request at its beginning.

        kind         "json_schema", "regex" or "ebnf" (Lark, or GBNF with its ``::=``)
        start_after  text that the output must contain before the grammar begins

        Raises: ValueError that begins with ``kind`` and says what is wrong.
        """
        if self._refusal is not None:
            raise ValueError(f"{kind}: {self._refusal}")
        assert self._tokenizer is not None
        matcher = self._cache.get((kind, text))
        if matcher is None:
            matcher = self._new_matcher(self._tokenizer.path, kind, text)
            self._cache[kind, text] = matcher
            if len(self._cache) > MAX_CACHED_GRAMMARS:
                self._cache.popitem(last=False)
        else:
            self._cache.move_to_end((kind, text))
        return GrammarState(
            matcher.deep_copy(),
            kind=kind,
            vocab_size=self._vocab_size,
            end_ids=self._end_ids,
            token_bytes=self._tokenizer.token_bytes,
            start_after=start_after,
        )

    def _new_matcher(self, tokenizer_file: Path, kind: str, text: str) -> Any:
        llguidance = _llguidance(kind)
        try:
            if self._table is None:
                self._table = _vocabulary(
                    llguidance, tokenizer_file, self._vocab_size, self._end_ids
                )
            grammar = _grammar(llguidance, kind, text)
        except ValueError as error:
            raise ValueError(f"{kind}: {error}") from error
        matcher = llguidance.LLMatcher(self._table, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(f"{kind}: {_first_lines(matcher.get_error())}")
        return matcher


def _llguidance(kind: str) -> ModuleType:
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise ValueError(f"{kind}: {_NEEDS_PACKAGE} ({error})") from error


def _vocabulary(llguidance: ModuleType, path: Path, vocab_size: int, end_ids: list[int]) -> Any:
    text = path.read_text(encoding="utf-8")
    return llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=end_ids)


def _grammar(llguidance: ModuleType, kind: str, text: str) -> str:
    matcher = llguidance.LLMatcher
    if kind == "json_schema":
        return matcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": _WHITESPACE})
    if kind == "regex":
        return matcher.grammar_from_regex(text)
    if "::=" in text:
        return matcher.grammar_from_lark(_lark_from_gbnf(text))
    return matcher.grammar_from_lark(text)


def _lark_from_gbnf(text: str) -> str:
    """The grammar in Lark's notation. Raises: ValueError for one that cannot be read."""
    convert = importlib.import_module("llguidance.gbnf_to_lark").gbnf_to_lark
    try:
        return convert(text)
    except Exception as error:  # bare exceptions, index and recursion errors, all about the text
        raise ValueError(f"the GBNF grammar cannot be read: {error}") from error


def _first_lines(text: str) -> str:
    """llguidance's message without the dump of its state."""
    return text.partition("\n<state>")[0].strip()
