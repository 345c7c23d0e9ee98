"""The byte-level BPE tokenizer, its special tokens and its Hugging Face files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096
BASE_VOCAB = 4064
# In the family's order; those that a parser must see survive skip_special_tokens.
SPECIAL_TOKENS: tuple[tuple[str, bool], ...] = (
    ("<|endoftext|>", True),
    ("<|im_start|>", True),
    ("<|im_end|>", True),
    ("<think>", False),
    ("</think>", False),
    ("<tool_call>", False),
    ("</tool_call>", False),
    ("<tool_response>", False),
    ("</tool_response>", False),
    ("<|vision_start|>", True),
    ("<|vision_end|>", True),
    ("<|image_pad|>", True),
    ("<|video_pad|>", True),
)
TOKEN_IDS = {token: BASE_VOCAB + i for i, (token, _) in enumerate(SPECIAL_TOKENS)}
END_OF_TEXT_ID = TOKEN_IDS["<|endoftext|>"]
IM_END_ID = TOKEN_IDS["<|im_end|>"]
# The drafters' mask is a spare embedding row beyond the tokenizer's ids, as in the family.
MASK_ID = VOCAB_SIZE - 1

# Contractions; a word with at most one leading non-letter; single digits; punctuation runs with
# their line ends; line ends; other white space.
_SPLIT = (
    r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Train on ``texts``; every byte has a token, so no text has an unknown part."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BASE_VOCAB,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != BASE_VOCAB:
        raise ValueError(f"{tokenizer.get_vocab_size()} tokens trained, {BASE_VOCAB} wanted")
    add_special_tokens(tokenizer)
    return tokenizer


def add_special_tokens(tokenizer: Tokenizer) -> None:
    """Append :data:`SPECIAL_TOKENS`; their ids follow the base vocabulary."""
    for token, special in SPECIAL_TOKENS:
        added = AddedToken(token, special=special, normalized=False)
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([added])


def load_chat_template() -> str:
    return (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")


def tokenizer_config(max_length: int) -> dict[str, Any]:
    """Content of ``tokenizer_config.json``, chat template included."""
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(TOKEN_IDS[token]): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": special,
            }
            for token, special in SPECIAL_TOKENS
        },
        "additional_special_tokens": [t for t, special in SPECIAL_TOKENS if special],
        "bos_token": None,
        "chat_template": load_chat_template(),
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": max_length,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }


def write_tokenizer(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``."""
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(tokenizer_config(max_length), indent=2, ensure_ascii=False) + "\n",
        encoding="utf-8",
    )
