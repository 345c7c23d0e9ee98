"""The data sets of a serving benchmark: what is asked, and how many tokens each answer gets.

Everything is drawn from one seeded generator, so equal options give equal prompts.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.benchmark.options import BenchError, LengthOptions, ServingOptions
from sglang.srt.managers.tokenizer import Tokenizer

DEFAULT_OUTPUT_TOKENS = 256
"""For a custom prompt that comes without a reply, an output length or --sharegpt-output-len."""


@dataclass(frozen=True)
class Prompt:
    """One request: text or token ids, its length in tokens, and how many tokens to generate."""

    content: str | list[int]
    num_tokens: int
    output_len: int


@dataclass(frozen=True)
class Vocabulary:
    """What prompts are made of: a tokenizer, or only the number of ids that the model takes."""

    tokenizer: Tokenizer | None
    vocab_size: int | None

    def need_tokenizer(self, why: str) -> Tokenizer:
        """Raises: BenchError if there is none."""
        if self.tokenizer is None:
            raise BenchError(
                f"{why} needs a tokenizer and none was found; give --tokenizer DIR (a folder with "
                "tokenizer.json), or use --dataset-name random-ids --tokenize-prompt"
            )
        return self.tokenizer

    def plain_ids(self) -> Sequence[int]:
        """Ids that may appear in a made-up prompt. Raises: BenchError if their number is unknown."""
        if self.tokenizer is not None:
            limit = self.tokenizer.num_tokens
            if self.vocab_size is not None:
                limit = min(limit, self.vocab_size)
            return [i for i in range(limit) if i not in self.tokenizer.special_ids]
        if self.vocab_size is None:
            raise BenchError(
                "the server does not say how large its vocabulary is; give --tokenizer DIR"
            )
        return range(self.vocab_size)


def make_prompts(options: ServingOptions, vocabulary: Vocabulary) -> list[Prompt]:
    """The requests of a benchmark, in the order in which they are sent. Raises: BenchError."""
    rng = random.Random(options.seed)
    makers: dict[str, Callable[[ServingOptions, Vocabulary, random.Random], list[Prompt]]] = {
        "sharegpt": _from_conversations,
        "custom": _from_conversations,
        "random": _random,
        "random-ids": _random,
        "generated-shared-prefix": _shared_prefix,
    }
    prompts = makers[options.dataset_name](options, vocabulary, rng)
    if not prompts:
        raise BenchError(
            f"--dataset-path {options.dataset_path} holds no usable prompt; see --dataset-name"
        )
    return prompts


def warm_up_prompt(prompt: Prompt) -> Prompt:
    """A prompt of the same length that shares no prefix with ``prompt``, for a short answer."""
    content = prompt.content
    if isinstance(content, str):
        content = ("warm-up " + content)[: max(len(content), 1)]
    else:
        content = [*content[-1:], *content[:-1]]
    return Prompt(content, prompt.num_tokens, min(prompt.output_len, 32))


class _Writer:
    """Turns drawn token ids into what a request carries."""

    def __init__(self, options: ServingOptions, vocabulary: Vocabulary) -> None:
        self._as_ids = options.tokenize_prompt or (
            vocabulary.tokenizer is None and options.kind.route != "chat"
        )
        self._tokenizer = None
        if not self._as_ids:
            self._tokenizer = vocabulary.need_tokenizer("a prompt sent as text")

    def write(self, ids: list[int], output_len: int) -> Prompt:
        """Text of random ids is cut into other tokens when it is read, so it is brought back to
        the wanted length where that can be done."""
        if self._tokenizer is None:
            return Prompt(ids, len(ids), output_len)
        text = self._tokenizer.decode(ids)
        read = self._tokenizer.encode(text)
        if len(read) > len(ids):
            text = self._tokenizer.decode(read[: len(ids)])
            read = self._tokenizer.encode(text)
        return Prompt(text, len(read), output_len)


def _lengths(rng: random.Random, full: int, ratio: float, count: int) -> list[int]:
    low = max(1, int(full * ratio))
    return [rng.randint(low, full) for _ in range(count)]


def _random(options: ServingOptions, vocabulary: Vocabulary, rng: random.Random) -> list[Prompt]:
    own: LengthOptions = options.lengths
    ratio, count = own.random_range_ratio, options.num_prompts
    input_lens = _lengths(rng, own.random_input_len, ratio, count)
    output_lens = _lengths(rng, own.random_output_len, ratio, count)
    writer = _Writer(options, vocabulary)
    if options.dataset_name == "random" and options.dataset_path is not None:
        source = _stretched(options, vocabulary, rng)
        return [writer.write(source(n), out) for n, out in zip(input_lens, output_lens)]
    ids = vocabulary.plain_ids()
    return [writer.write(rng.choices(ids, k=n), out) for n, out in zip(input_lens, output_lens)]


def _stretched(
    options: ServingOptions, vocabulary: Vocabulary, rng: random.Random
) -> Callable[[int], list[int]]:
    """Prompts of a conversation file, repeated or cut to a length."""
    tokenizer = vocabulary.need_tokenizer("--dataset-path with --dataset-name random")
    texts = [text for text, _ in _conversations(Path(str(options.dataset_path)))]
    pool = [ids for text in texts if (ids := tokenizer.encode(text))]
    if not pool:
        raise BenchError(f"--dataset-path {options.dataset_path} holds no text")
    rng.shuffle(pool)
    order = iter(range(1 << 62))

    def take(length: int) -> list[int]:
        ids = pool[next(order) % len(pool)]
        return (ids * (length // len(ids) + 1))[:length]

    return take


def _shared_prefix(
    options: ServingOptions, vocabulary: Vocabulary, rng: random.Random
) -> list[Prompt]:
    own = options.lengths
    writer = _Writer(options, vocabulary)
    ids = vocabulary.plain_ids()
    prompts = []
    for _ in range(own.gsp_num_groups):
        shared = rng.choices(ids, k=own.gsp_system_prompt_len)
        for _ in range(own.gsp_prompts_per_group):
            question = rng.choices(ids, k=own.gsp_question_len)
            prompts.append(writer.write(shared + question, own.gsp_output_len))
    rng.shuffle(prompts)
    return prompts


def _from_conversations(
    options: ServingOptions, vocabulary: Vocabulary, rng: random.Random
) -> list[Prompt]:
    own = options.lengths
    tokenizer = vocabulary.need_tokenizer(f"--dataset-name {options.dataset_name}")
    rows = list(_rows_of(options))
    rng.shuffle(rows)
    prompts: list[Prompt] = []
    for content, reply, output_len in rows:
        if len(prompts) == options.num_prompts:
            break
        ids = tokenizer.encode(content) if isinstance(content, str) else content
        wanted = own.sharegpt_output_len or output_len
        if wanted is None:
            wanted = len(tokenizer.encode(reply)) if reply else DEFAULT_OUTPUT_TOKENS
        if len(ids) < 2 or wanted < 1:
            continue
        if own.sharegpt_context_len and len(ids) + wanted > own.sharegpt_context_len:
            continue
        prompts.append(Prompt(ids if options.tokenize_prompt else content, len(ids), wanted))
    return prompts


def _rows_of(options: ServingOptions) -> Iterator[tuple[str | list[int], str, int | None]]:
    """(prompt, reply or "", output length or None) of every usable entry of the file."""
    path = Path(str(options.dataset_path))
    if options.dataset_name == "sharegpt":
        for prompt, reply in _conversations(path):
            if reply:
                yield prompt, reply, None
        return
    for number, line in enumerate(_read(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise BenchError(
                f"--dataset-path {path}: line {number} is not JSON ({error})"
            ) from error
        yield _custom_row(row, f"--dataset-path {path}: line {number}")


def _custom_row(row: Any, where: str) -> tuple[str | list[int], str, int | None]:
    if isinstance(row, dict):
        turns = _turns(row)
        prompt = row.get("prompt", turns[0] if turns else None)
        reply = turns[1] if len(turns) > 1 else ""
        output_len = row.get("output_len")
        if output_len is None or type(output_len) is int:
            if isinstance(prompt, str):
                return prompt, reply, output_len
            if isinstance(prompt, list) and all(type(i) is int for i in prompt):
                return prompt, reply, output_len
    raise BenchError(
        f'{where} needs "prompt" (text or token ids, with an optional number "output_len"), or '
        '"conversations" with a first turn'
    )


def _conversations(path: Path) -> Iterator[tuple[str, str]]:
    """First turn and its reply ("" if there is none) of each entry of a ShareGPT file."""
    try:
        entries = json.loads(_read(path))
    except json.JSONDecodeError as error:
        raise BenchError(
            f"--dataset-path {path}: is not JSON ({error}); a file of lines is --dataset-name custom"
        ) from error
    if not isinstance(entries, list):
        raise BenchError(f"--dataset-path {path}: must hold a list of conversations")
    for entry in entries:
        turns = _turns(entry) if isinstance(entry, dict) else []
        if turns:
            yield turns[0], turns[1] if len(turns) > 1 else ""


def _turns(entry: dict[str, Any]) -> list[str]:
    turns = entry.get("conversations", entry.get("conversation", []))
    if not isinstance(turns, list):
        return []
    texts = [t.get("value", t.get("content")) for t in turns if isinstance(t, dict)]
    return [text for text in texts if isinstance(text, str)]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"--dataset-path {path}: cannot be read ({error})") from error
