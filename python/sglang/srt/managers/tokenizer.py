"""Text to ids and back, on the `tokenizers` library alone; used by both processes."""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any, Protocol

import tokenizers
from tokenizers.decoders import DecodeStream


class IncrementalDecoder(Protocol):
    """Ids in, text out; never splits a character."""

    def step(self, token_id: int) -> str:
        """Text that became certain with this id, possibly empty."""

    def finish(self) -> str:
        """What is left: an unfinished character becomes U+FFFD."""


class Tokenizer:
    """A checkpoint's `tokenizer.json` and the facts of its `tokenizer_config.json`.

    Attributes: `config` (the second file, {} if absent), `num_tokens` (addressable ids, which may
    be fewer than the model's vocabulary), `eos_token_id` or None, `special_ids`, `added_texts`
    (texts that are one token each wherever they stand, special or not).
    Raises: ValueError if there is no readable tokenizer at `path`.
    """

    def __init__(self, path: str | Path) -> None:
        folder = Path(path)
        file = folder if folder.is_file() else folder / "tokenizer.json"
        if not file.is_file():
            raise ValueError(
                f"--tokenizer-path {str(path)!r} has no tokenizer.json; give a folder or file with "
                "one (convert other formats with transformers' save_pretrained)"
            )
        try:
            self.backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"cannot read {file}: {error}") from error
        self.backend.no_truncation()  # a tokenizer.json may ask for either
        self.backend.no_padding()
        self.path = file
        self.config = _read_json(file.parent / "tokenizer_config.json")
        self.num_tokens = self.backend.get_vocab_size(with_added_tokens=True)
        added = self.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.added_texts = frozenset(token.content for token in added.values())
        self.eos_token_id = self._id_of(self.config.get("eos_token"))
        self.bos_token = _token_text(self.config.get("bos_token"))
        self.eos_token = _token_text(self.config.get("eos_token"))
        self.is_byte_level = type(self.backend.decoder).__name__ == "ByteLevel"
        self._bytes: dict[int, bytes] = {}

    def _id_of(self, token: Any) -> int | None:
        text = _token_text(token)
        return None if text is None else self.backend.token_to_id(text)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; special tokens written out in it become their ids."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; ids without a token give nothing."""
        decoder = self.incremental_decoder(skip_special_tokens=skip_special_tokens)
        if isinstance(decoder, ByteLevelDecoder):
            return decoder.decode_all(ids)
        known = [i for i in ids if 0 <= i < self.num_tokens]
        return self.backend.decode(known, skip_special_tokens=skip_special_tokens)

    def incremental_decoder(
        self, *, skip_special_tokens: bool, context_ids: list[int] | None = None
    ) -> IncrementalDecoder:
        """A fresh decoder; `context_ids` are the last prompt ids, for tokenizers where a token's
        text depends on its neighbours."""
        if self.is_byte_level:
            return ByteLevelDecoder(self, self.special_ids if skip_special_tokens else frozenset())
        return StreamDecoder(self, skip_special_tokens, context_ids or [])

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes this id adds to the text; empty for an id without a token."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._find_bytes(token_id)
            self._bytes[token_id] = known
        return known

    def token_text(self, token_id: int) -> str:
        """The id's own text, with U+FFFD for a part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def _find_bytes(self, token_id: int) -> bytes:
        token = self.backend.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        if not self.is_byte_level:
            return self.backend.decode([token_id], skip_special_tokens=False).encode()
        try:
            return bytes(_BYTE_OF_CHAR[char] for char in token)
        except KeyError:  # an added token with characters outside the byte alphabet
            return token.encode()


class NoTokenizer:
    """Stands in where a server runs without one: ids pass, text is refused."""

    config: dict[str, Any] = {}
    num_tokens = 0
    eos_token_id = None
    special_ids: frozenset[int] = frozenset()
    added_texts: frozenset[str] = frozenset()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raises: ValueError always."""
        raise ValueError("this server runs with --skip-tokenizer-init: send input_ids, not text")

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """The empty text."""
        return ""

    def incremental_decoder(
        self, *, skip_special_tokens: bool, context_ids: list[int] | None = None
    ) -> IncrementalDecoder:
        """A decoder that gives no text."""
        return _NoText()

    def token_bytes(self, token_id: int) -> bytes:
        """No bytes."""
        return b""

    def token_text(self, token_id: int) -> str:
        """No text."""
        return ""


class _NoText:
    def step(self, token_id: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


class ByteLevelDecoder:
    """Exact and cheap for byte-level vocabularies: each token is a fixed string of bytes."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)

    def decode_all(self, ids: list[int]) -> str:
        """Text of a whole sequence at once; leaves this decoder as it was."""
        token_bytes, skipped = self._tokenizer.token_bytes, self._skipped
        return b"".join(token_bytes(i) for i in ids if i not in skipped).decode("utf-8", "replace")


class StreamDecoder:
    """Any other tokenizer, through the library's own stream."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, context_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._context = context_ids[-8:]
        self._stream = self._new_stream()
        self._pending: list[int] = []

    def _new_stream(self) -> DecodeStream:
        return DecodeStream(ids=self._context, skip_special_tokens=self._skip_special)

    def step(self, token_id: int) -> str:
        if not 0 <= token_id < self._tokenizer.num_tokens:
            return ""
        text = self._stream.step(self._tokenizer.backend, token_id)
        if text is None:
            self._pending.append(token_id)
            return ""
        self._pending.clear()
        return text

    def finish(self) -> str:
        text = self._tokenizer.decode(self._pending, self._skip_special)
        self._pending.clear()
        return text


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"cannot read {path}: {error}") from error


def _token_text(token: Any) -> str | None:
    """tokenizer_config.json spells a token as a string or as an object with its content."""
    return token.get("content") if isinstance(token, dict) else token


def _byte_alphabet() -> dict[str, int]:
    """Inverse of the byte-level alphabet: printable Latin-1 stands for itself, every other byte
    for the next code point from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + rank): byte for rank, byte in enumerate(others)})
    return table


_BYTE_OF_CHAR = _byte_alphabet()
