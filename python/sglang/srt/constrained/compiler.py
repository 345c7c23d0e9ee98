"""From a request's constraint to a matcher of llguidance.

llguidance is an optional package. Its table of the vocabulary takes seconds to build for a large one and
holds the interpreter's lock meanwhile, so a server builds it before it is ready (``prepare``). Compiling a
constraint lets go of the lock; ``managers/intake.py`` does it beside the scheduler's loop.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import logging
import time
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from sglang.srt.constrained.format_or_calls import JSON_WHITESPACE
from sglang.srt.constrained.grammar_state import GrammarState
from sglang.srt.managers.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_CACHED_GRAMMARS = 64
MAX_CACHED_FAULTS = 256
_NEEDS_PACKAGE = (
    "constrained decoding needs the package llguidance on the server; install it with "
    "pip install 'sglang-lossless[grammar]'"
)


class GrammarCompiler:
    """Compiles constraints for one vocabulary; keeps the latest ones, and why the latest bad ones fail.

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
        self._faults: OrderedDict[bytes, str] = OrderedDict()

    def compile(self, kind: str, text: str, *, start_after: str | None = None) -> GrammarState:
        """State of one request at its beginning.

        kind         "json_schema", "regex" or "ebnf" (Lark, or GBNF with its ``::=``)
        start_after  text that the output must contain before the grammar begins

        Raises: ValueError that begins with ``kind`` and says what is wrong.
        """
        if self._refusal is not None:
            raise ValueError(f"{kind}: {self._refusal}")
        assert self._tokenizer is not None
        fault = self._faults.get(_fault_key(kind, text))
        if fault is not None:
            raise ValueError(fault)
        matcher = self._cache.get((kind, text))
        if matcher is None:
            self.take_over(kind, text, self.try_compile(kind, text))
            return self.compile(kind, text, start_after=start_after)
        self._cache.move_to_end((kind, text))
        return GrammarState(
            matcher.deep_copy(),
            kind=kind,
            vocab_size=self._vocab_size,
            end_ids=self._end_ids,
            token_bytes=self._tokenizer.token_bytes,
            start_after=start_after,
        )

    def prepare(self) -> None:
        """Build the table of the vocabulary now, if this server can enforce constraints at all."""
        if self._refusal is not None or importlib.util.find_spec("llguidance") is None:
            return
        started = time.monotonic()
        try:
            self._load_table(_llguidance("vocabulary"))
        except ValueError as error:
            logger.warning("constrained decoding is refused: %s", error)
            self._refusal = f"llguidance cannot use this server's tokenizer: {error}"
            return
        took = time.monotonic() - started
        logger.info("grammar table of %d tokens built in %.1f s", self._vocab_size, took)

    def is_quick(self, kind: str, text: str) -> bool:
        """Whether ``compile`` answers without compiling: known, known to be bad, or refused anyway."""
        if self._refusal is not None:
            return True
        return (kind, text) in self._cache or _fault_key(kind, text) in self._faults

    def try_compile(self, kind: str, text: str) -> Any:
        """A new matcher, or a ValueError that says what is wrong. For any thread: the caches stay as they are."""
        try:
            return self._new_matcher(kind, text)
        except ValueError as error:
            return error
        except (
            Exception
        ) as error:  # of llguidance or its converters, about a text that a client chose
            return ValueError(f"{kind}: cannot be compiled: {type(error).__name__}: {error}")

    def take_over(self, kind: str, text: str, result: Any) -> None:
        """Keep what ``try_compile`` returned, also if it is an error."""
        if isinstance(result, ValueError):
            self._faults[_fault_key(kind, text)] = str(result)
            if len(self._faults) > MAX_CACHED_FAULTS:
                self._faults.popitem(last=False)
            return
        self._cache[kind, text] = result
        if len(self._cache) > MAX_CACHED_GRAMMARS:
            self._cache.popitem(last=False)

    def _load_table(self, llguidance: ModuleType) -> Any:
        if self._table is None:
            assert self._tokenizer is not None
            path = self._tokenizer.path
            self._table = _vocabulary(llguidance, path, self._vocab_size, self._end_ids)
        return self._table

    def _new_matcher(self, kind: str, text: str) -> Any:
        llguidance = _llguidance(kind)
        try:
            table = self._load_table(llguidance)
            grammar = _grammar(llguidance, kind, text)
        except ValueError as error:
            raise ValueError(f"{kind}: {error}") from error
        matcher = llguidance.LLMatcher(table, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(f"{kind}: {_first_lines(matcher.get_error())}")
        return matcher


def _fault_key(kind: str, text: str) -> bytes:
    return hashlib.blake2b(f"{kind} {text}".encode("utf-8", "surrogatepass")).digest()


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
        return matcher.grammar_from_json_schema(
            text, defaults={"whitespace_pattern": JSON_WHITESPACE}
        )
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
