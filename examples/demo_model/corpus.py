"""Builds the tokenised corpus from the fetched packages, and reads it back."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from examples.demo_model.chat_data import Example, build_examples
from examples.demo_model.errors import DemoModelError
from examples.demo_model.extract import documents
from examples.demo_model.sources import SOURCES, fetch
from examples.demo_model.tokenizer import (
    END_OF_TEXT_ID,
    VOCAB_SIZE,
    train_tokenizer,
    write_tokenizer,
)

FORMAT = 2
HELD_OUT_SHARE = 50  # one document in this many
MAX_CONTEXT = 8192


@dataclass(frozen=True)
class TokenStream:
    """A run of tokens ``[n]`` (uint16) of which one pass reads ``repeat`` copies."""

    name: str
    tokens: np.ndarray
    repeat: int


@dataclass(frozen=True)
class Corpus:
    """Tokenised text. ``held_out`` holds whole documents, none of which is in ``train``."""

    train: list[TokenStream]
    held_out: np.ndarray
    held_out_bytes: int
    chat: np.ndarray  # [n] uint16
    chat_mask: np.ndarray  # [n] uint8, 1 where the token is part of an answer
    chat_starts: np.ndarray  # [m] int64, first token of each conversation
    chat_held_out_from: int  # index into chat_starts
    tokenizer: Tokenizer
    directory: Path


def build(directory: Path) -> None:
    """Fetch, clean, split and tokenise everything into ``directory`` (all files or none)."""
    unpacked = fetch(directory / "raw")
    seen: set[bytes] = set()
    train: dict[str, list[str]] = {}
    held_out: list[str] = []
    for source in tqdm(SOURCES, desc="clean", unit="source"):
        if source.name == "dialogue":
            continue
        train[source.name] = []
        for name, text in documents(source.name, unpacked[source.name]):
            text = _drop_repeated_paragraphs(text, seen)
            if len(text) < 300:
                continue
            (held_out if _is_held_out(name) else train[source.name]).append(text)

    tokenizer = train_tokenizer(text for texts in train.values() for text in texts)
    paragraphs = _answer_paragraphs(train)
    examples = build_examples(unpacked["dialogue"], paragraphs, random.Random(0))
    packages = {source.name: _package_file(directory, source.name) for source in SOURCES}
    write_tokens(directory, tokenizer, train, held_out, examples, packages)


def write_tokens(
    directory: Path,
    tokenizer: Tokenizer,
    train: dict[str, list[str]],
    held_out: list[str],
    examples: list[Example],
    packages: dict[str, str],
) -> None:
    """Tokenise documents (by source name) and conversations into ``directory/tokens``."""
    scratch = directory / ".tokens.partial"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    write_tokenizer(tokenizer, scratch, MAX_CONTEXT)
    streams = {}
    for name, texts in tqdm(train.items(), desc="tokenise", unit="source"):
        tokens = _encode_documents(tokenizer, texts)
        tokens.tofile(scratch / f"train_{name}.bin")
        streams[name] = len(tokens)
    _encode_documents(tokenizer, held_out).tofile(scratch / "held_out.bin")
    manifest = {
        "format": FORMAT,
        "tokenizer_sha256": _digest(scratch / "tokenizer.json"),
        "train_tokens": streams,
        "held_out_bytes": sum(len(text.encode()) for text in held_out),
        "packages": packages,
        **_write_chat(tokenizer, examples, scratch),
    }
    manifest["files"] = {file.name: _digest(file) for file in sorted(scratch.glob("*.bin"))}
    (scratch / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    target = directory / "tokens"
    shutil.rmtree(target, ignore_errors=True)
    scratch.rename(target)


def load(directory: Path) -> Corpus:
    """Read what :func:`build` wrote.

    Raises:
        DemoModelError: nothing is there, the build is of another format, a file is missing or
            damaged, or the tokenizer is not the one that made the tokens.
    """
    home = directory / "tokens"
    if not (home / "manifest.json").is_file():
        raise DemoModelError(
            f"no corpus in {directory}; build it with: python -m examples.demo_model corpus "
            f"--data {directory}"
        )
    manifest = json.loads((home / "manifest.json").read_text())
    if manifest["format"] != FORMAT:
        raise DemoModelError(
            f"the corpus in {directory} has format {manifest['format']}, this program reads "
            f"{FORMAT}; delete {home} and build it again"
        )
    for name in ("tokenizer.json", *manifest["files"]):
        if not (home / name).is_file():
            raise DemoModelError(
                f"{home / name} is missing; delete {home} and build the corpus again"
            )
    if _digest(home / "tokenizer.json") != manifest["tokenizer_sha256"]:
        raise DemoModelError(
            f"{home / 'tokenizer.json'} is not the tokenizer that made the tokens beside it; "
            f"delete {home} and build the corpus again"
        )
    for name, digest in manifest["files"].items():
        if _digest(home / name) != digest:
            raise DemoModelError(
                f"{home / name} is damaged; delete {home} and build the corpus again"
            )
    repeats = {source.name: source.repeat for source in SOURCES}
    streams = [
        TokenStream(name, _read_tokens(home / f"train_{name}.bin"), repeats[name])
        for name in manifest["train_tokens"]
    ]
    return Corpus(
        train=streams,
        held_out=_read_tokens(home / "held_out.bin"),
        held_out_bytes=manifest["held_out_bytes"],
        chat=_read_tokens(home / "chat.bin"),
        chat_mask=np.fromfile(home / "chat_mask.bin", dtype=np.uint8),
        chat_starts=np.array(manifest["chat_starts"], dtype=np.int64),
        chat_held_out_from=manifest["chat_held_out_from"],
        tokenizer=Tokenizer.from_file(str(home / "tokenizer.json")),
        directory=home,
    )


def _read_tokens(path: Path) -> np.ndarray:
    tokens = np.fromfile(path, dtype=np.uint16)
    if len(tokens) and int(tokens.max()) >= VOCAB_SIZE:
        raise DemoModelError(
            f"{path} has token id {tokens.max()}, the vocabulary ends at {VOCAB_SIZE - 1}; it was "
            "made with another tokenizer, build the corpus again"
        )
    return tokens


def _drop_repeated_paragraphs(text: str, seen: set[bytes]) -> str:
    """Paragraphs of some length that an earlier document already had are dropped; ``seen`` grows."""
    kept = []
    for paragraph in text.split("\n\n"):
        if len(paragraph) >= 60:
            key = hashlib.blake2b(paragraph.encode(), digest_size=12).digest()
            if key in seen:
                continue
            seen.add(key)
        kept.append(paragraph)
    return "\n\n".join(kept)


def _is_held_out(document: str) -> bool:
    digest = hashlib.sha256(document.encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT_SHARE == 0


def _encode_documents(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(texts):
        ids.extend(encoding.ids)
        ids.append(END_OF_TEXT_ID)
    return np.array(ids, dtype=np.uint16)


def _answer_paragraphs(train: dict[str, list[str]]) -> list[str]:
    """Prose of a length that suits an answer."""
    return [
        paragraph
        for name in ("austen", "moby_dick", "bible", "postgresql", "python", "sqlite")
        for text in train[name]
        for paragraph in text.split("\n\n")
        if 150 < len(paragraph) < 700
    ]


def _write_chat(
    tokenizer: Tokenizer, examples: list[Example], directory: Path
) -> dict[str, object]:
    ids: list[int] = []
    mask: list[int] = []
    starts: list[int] = []
    for example in examples:
        prompt, answer = (tokenizer.encode(part).ids for part in example.prompt_and_answer())
        starts.append(len(ids))
        ids += [*prompt, *answer, END_OF_TEXT_ID]
        mask += [0] * len(prompt) + [1] * len(answer) + [0]
    np.array(ids, dtype=np.uint16).tofile(directory / "chat.bin")
    np.array(mask, dtype=np.uint8).tofile(directory / "chat_mask.bin")
    return {"chat_starts": starts, "chat_held_out_from": len(starts) * 19 // 20}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _package_file(directory: Path, source: str) -> str:
    files = sorted((directory / "raw" / "archives" / source).iterdir())
    return files[0].name if files else ""
