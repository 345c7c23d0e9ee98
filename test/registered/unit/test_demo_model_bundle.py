"""The bundled demo model and drafters: format, size, text, drafts."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from sglang.bundled import BUNDLED_NAMES, bundled_directory, resolve_model_path
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=40, suite="unit")

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from examples.demo_model.chat_data import TOOLS, render  # noqa: E402
from examples.demo_model.config import FULL_PLAN  # noqa: E402
from examples.demo_model.evaluate import (  # noqa: E402
    accept_lengths_block,
    accept_lengths_mtp,
    walk,
)
from examples.demo_model.export import load_drafter, load_target  # noqa: E402
from examples.demo_model.generate import continue_prompts  # noqa: E402
from examples.demo_model.optimise import Device  # noqa: E402
from examples.demo_model.tokenizer import MASK_ID, TOKEN_IDS, load_chat_template  # noqa: E402

CPU = torch.device("cpu")
PROSE = (
    "It is a truth that every family in the country must acknowledge, that a young man who has "
    "come into a large fortune will be thought of as the property of some daughter of the house."
)
FUNCTION_WORDS = frozenset(
    "the of and to a in that is it was for with be as his her not he".split()
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(bundled_directory("demo") / "tokenizer.json"))


@pytest.fixture(scope="module")
def target():
    return load_target(FULL_PLAN.target, bundled_directory("demo").parent, CPU)


@pytest.fixture(scope="module")
def continuations(target, tokenizer) -> tuple[torch.Tensor, list[int]]:
    """Greedy continuations to 128 tokens, and where each begins."""
    openings = [
        PROSE,
        "The President of the United States has the honour to",
        "CHAPTER 1.\n\nThe ship lay in the harbour, and the captain",
        "The server reads the configuration file when",
        "KING HENRY\nMy lord, I pray you tell me",
        "Then the people of the city came to him and said,",
        "This function returns a new object that",
        "Elinor could not be surprised at their",
    ]
    prompts = [torch.tensor(tokenizer.encode(text).ids).numpy() for text in openings]
    ids = continue_prompts(target, prompts, 128, torch.zeros(8), seed=0, autocast=False)
    return ids, [len(prompt) for prompt in prompts]


def test_names_resolve() -> None:
    """Catches a bundled name that is left as a path, and a path that is taken for a name."""
    for name in BUNDLED_NAMES:
        assert Path(resolve_model_path(name), "config.json").is_file()
    assert resolve_model_path("./demo") == "./demo"
    assert resolve_model_path("org/model") == "org/model"
    with pytest.raises(KeyError, match="demo-dflash"):
        bundled_directory("demo-eagle")


def test_size_and_card() -> None:
    """Catches a bundle too large for a wheel, and a card without what it must state."""
    files = [f for name in BUNDLED_NAMES for f in bundled_directory(name).iterdir()]
    assert sum(f.stat().st_size for f in files) <= 40e6
    card = bundled_directory("demo").joinpath("README.md").read_text()
    for words in ("Bits per byte", "public domain", "python -m examples.demo_model train"):
        assert words in card
    for title, least in (("MTP, D = 4", 2.2), ("DFLASH, D = 8", 2.5), ("DSPARK, D = 8", 2.5)):
        row = re.search(rf"^\| {re.escape(title)}[^|]*\| ([0-9.]+)", card, re.MULTILINE)
        assert row is not None and float(row.group(1)) >= least, title


def test_draft_checkpoints_have_the_published_names() -> None:
    """Catches an embedding or head in a drafter, a tap beyond the last-but-one layer, a wrong D."""
    for name, rows in (("demo-dflash", 8), ("demo-dspark", 7)):
        config = json.loads((bundled_directory(name) / "config.json").read_text())
        tensors = load_file(bundled_directory(name) / "model.safetensors")
        inner = config["dflash_config"]
        assert inner.get("block_size", config.get("block_size")) == rows
        taps = inner["target_layer_ids"]
        assert taps == sorted(set(taps)) and taps[-1] < config["num_target_layers"] - 1
        hidden = config["hidden_size"]
        assert tensors["fc.weight"].shape == (hidden, len(taps) * hidden)
        assert tensors["layers.0.self_attn.q_norm.weight"].shape == (config["head_dim"],)
        assert not any(part in key for key in tensors for part in ("embed_tokens", "lm_head"))
        assert inner["mask_token_id"] == MASK_ID < config["vocab_size"]
        assert all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())
        if name == "demo-dspark":
            assert config["architectures"] == ["DSparkDraftModel"]
            rank = config["markov_rank"]
            assert tensors["markov_head.markov_w1.weight"].shape == (config["vocab_size"], rank)
            assert tensors["confidence_head.proj.weight"].shape == (1, hidden + rank)
        else:
            assert config["architectures"] == ["DFlashDraftModel"]


def test_tokenizer_keeps_every_byte(tokenizer: Tokenizer) -> None:
    """Catches a byte without a token, a lossy normaliser, and a special token that is split."""
    for text in ("héllo wörld 日本語 🎉", "\t\n\n  x\r\n", "".join(map(chr, range(256))), "ﬁ é"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    for token, index in TOKEN_IDS.items():
        assert tokenizer.encode(token).ids == [index]
    assert tokenizer.get_vocab_size() < MASK_ID


def test_chat_template_structure() -> None:
    """Catches a shipped template that is not the reviewed one, and a lost turn or thinking switch."""
    config = json.loads((bundled_directory("demo") / "tokenizer_config.json").read_text())
    assert config["chat_template"] == load_chat_template()
    user = {"role": "user", "content": "Hi"}
    open_think = render([user], add_generation_prompt=True)
    assert open_think == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    closed = render([user], add_generation_prompt=True, enable_thinking=False)
    assert closed == open_think + "\n</think>\n\n"
    call = {"function": {"name": "add", "arguments": {"a": 1, "b": "x"}}}
    history = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "old thought"},
        {"role": "user", "content": [{"type": "text", "text": "Two?"}]},
        {"role": "assistant", "content": None, "reasoning_content": "new", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "4"},
    ]
    text = render(history, tools=[TOOLS["add"]], add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\n# Tools\n")
    assert "<tools>\n" + json.dumps(TOOLS["add"]) + "\n</tools>" in text
    assert "old thought" not in text and "<think>\nnew\n</think>" in text
    assert "old thought" in render(history, preserve_thinking=True)
    assert (
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\n"
        "</parameter>\n</function>\n</tool_call><|im_end|>\n" in text
    )
    answers = "<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response>"
    assert f"<|im_start|>user\n{answers}<|im_end|>\n" in text


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "At least one message"),
        ([{"role": "system", "content": "x"}], "no user message"),
        (
            [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}],
            "must be the first",
        ),
        ([{"role": "user", "content": [{"type": "image"}]}], "reads text only"),
        (
            [{"role": "user", "content": "x"}, {"role": "robot", "content": "y"}],
            "Unknown role robot",
        ),
    ],
)
def test_chat_template_refuses(messages: list[dict], words: str) -> None:
    """Catches a conversation that is silently rendered wrong."""
    jinja2 = pytest.importorskip("jinja2")
    with pytest.raises(jinja2.TemplateError, match=words):
        render(messages)


def test_transformers_gives_the_same_logits(target, tokenizer: Tokenizer) -> None:
    """Catches any difference between the trained function and the published format: gate layout,
    conv order, norm offsets, head grouping, rotary pairing."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    path = bundled_directory("demo")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, output_loading_info=True
    )
    assert type(model).__name__ == "Qwen3_5ForCausalLM"
    assert not info["missing_keys"] and not info["mismatched_keys"]
    ids = torch.tensor([tokenizer.encode(PROSE).ids * 4])
    assert ids.shape[1] > 2 * 64  # more than two chunks
    with torch.no_grad():
        reference = model(ids).logits
        ours = target.logits(target(ids).hidden)
    error = (ours - reference).norm() / reference.norm()
    assert error < 1e-4, error
    shifted = (ours[:, 1:] - reference[:, :-1]).norm() / reference.norm()
    assert shifted > 0.1  # the measure sees a difference

    wrapped = transformers.AutoTokenizer.from_pretrained(path)
    messages = [{"role": "user", "content": "Hello"}]
    rendered = wrapped.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == render(messages, add_generation_prompt=True)
    assert wrapped(PROSE)["input_ids"] == tokenizer.encode(PROSE).ids
    assert wrapped.eos_token == "<|im_end|>"


def test_it_predicts_english(target, tokenizer: Tokenizer, continuations) -> None:
    """Catches untrained or damaged weights: surprise at plain prose, and words it writes."""

    def bits_per_byte(text: str) -> float:
        ids = torch.tensor([tokenizer.encode(text).ids])
        with torch.no_grad():
            logits = target.logits(target(ids).hidden[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits[0], ids[0, 1:], reduction="sum")
        return loss.item() / 0.6931 / len(text.encode())

    assert bits_per_byte(PROSE) < 1.9
    scrambled = "".join(PROSE[i * 37 % len(PROSE)] for i in range(len(PROSE)))
    assert bits_per_byte(scrambled) > 3.5
    ids, starts = continuations
    words = " ".join(
        tokenizer.decode(row[start:]) for row, start in zip(ids.tolist(), starts, strict=True)
    )
    found = re.findall(r"[a-z']+", words.lower())
    share = sum(word in FUNCTION_WORDS for word in found) / len(found)
    assert 0.2 < share < 0.7, (share, words)


def test_chat_answers_stop(target, tokenizer: Tokenizer) -> None:
    """Catches a model that never ends its turn, and a tool call that no parser would accept."""
    question = [{"role": "user", "content": "What time is it in Lisbon?"}]
    prompts = [
        render([{"role": "user", "content": "Hello"}], add_generation_prompt=True),
        render(
            question, tools=[TOOLS["get_time"]], add_generation_prompt=True, enable_thinking=False
        ),
    ]
    encoded = [torch.tensor(tokenizer.encode(prompt).ids).numpy() for prompt in prompts]
    length = max(map(len, encoded)) + 48
    ids = continue_prompts(target, encoded, length, torch.zeros(2), seed=0, autocast=False)
    answers = [
        tokenizer.decode(row[len(prompt) :], skip_special_tokens=False).split("<|im_end|>")
        for row, prompt in zip(ids.tolist(), encoded, strict=True)
    ]
    assert all(len(parts) > 1 for parts in answers), answers
    assert "</think>" in answers[0][0] and "Hello" in answers[0][0]
    assert answers[1][0] == (
        "<tool_call>\n<function=get_time>\n<parameter=city>\nLisbon\n</parameter>\n</function>\n"
        "</tool_call>"
    )


@pytest.mark.parametrize("kind", ["mtp", "dflash", "dspark"])
@torch.no_grad()
def test_drafts_are_accepted(kind: str, target, continuations) -> None:
    """Catches a drafter trained for another target, wrong taps, and a row off by one. A small
    sample, so the bound is below the card's figure; damaged weights must fall under it."""
    ids, starts = continuations
    ends = [ids.shape[1]] * len(starts)
    device = Device(CPU)
    bundle = bundled_directory("demo").parent
    if kind == "mtp":
        module = target.mtp
        accept = accept_lengths_mtp(target, device)
    else:
        module = load_drafter(FULL_PLAN.drafter_geometry(kind), bundle, CPU)
        accept = accept_lengths_block(target, module, device)
    good = walk(accept(ids).tolist(), starts, ends)
    assert good.steps > 50
    assert good.tokens_per_step > 1.9, good
    original = module.fc.weight.clone()
    module.fc.weight.copy_(original.flip(0))
    damaged = walk(accept(ids).tolist(), starts, ends)
    module.fc.weight.copy_(original)
    assert damaged.tokens_per_step < 1.5, damaged


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
