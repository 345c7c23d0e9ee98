"""Held-out bits per byte and greedy acceptance of the exported checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F

from examples.demo_model.batches import ChatWindows, held_out_prompts, held_out_windows
from examples.demo_model.config import Plan
from examples.demo_model.corpus import Corpus
from examples.demo_model.drafters import BlockDrafter, predict
from examples.demo_model.generate import continue_prompts
from examples.demo_model.model import DemoModel
from examples.demo_model.optimise import Device
from examples.demo_model.stages import MTP_DEPTH
from examples.demo_model.tokenizer import IM_END_ID

WINDOW = 1024
ROWS_AT_ONCE = 32

# ids [B, T] -> number of leading right drafts for the anchor at every position [B, T]; positions
# too near the end hold -1.
AcceptFunction = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Acceptance:
    """Greedy speculation replayed over the target's own greedy continuations."""

    tokens_per_step: float
    steps: int
    tokens: int


@dataclass(frozen=True)
class Report:
    """Everything the model card states."""

    bits_per_byte: float
    held_out_tokens: int
    repeated_share: float
    acceptance: dict[str, dict[str, Acceptance]]
    samples: list[str]

    def to_json(self) -> dict[str, object]:
        return asdict(self)


@torch.no_grad()
def bits_per_byte(
    model: DemoModel, corpus: Corpus, tokens: int, device: Device
) -> tuple[float, int]:
    """Held-out bits per byte over windows of 1024 tokens, and the tokens predicted."""
    windows = held_out_windows(corpus, tokens, min(WINDOW, len(corpus.held_out)))
    nats, predicted = 0.0, 0
    for rows in windows.split(ROWS_AT_ONCE):
        ids = rows.to(device.torch_device)
        with device.precision():
            logits = model.logits(model(ids).hidden[:, :-1])
        losses = F.cross_entropy(
            logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"
        )
        nats += losses.item()
        predicted += ids[:, 1:].numel()
    bytes_per_token = corpus.held_out_bytes / len(corpus.held_out)
    return nats / math.log(2) / (predicted * bytes_per_token), predicted


def accept_lengths_mtp(model: DemoModel, device: Device) -> AcceptFunction:
    """Drafting from anchor ``L`` starts with the MTP row ``(h at L-1, token L)``."""

    def accept(ids: torch.Tensor) -> torch.Tensor:
        with device.precision():
            chain = model.mtp_chain(model(ids).hidden, ids, MTP_DEPTH)
            rows = chain[0].shape[1]
            right = [
                model.logits(output).argmax(-1) == ids[:, depth + 2 : depth + 2 + rows]
                for depth, output in enumerate(chain)
            ]
        leading = torch.stack(right, dim=-1).long().cumprod(-1).sum(-1)
        return _placed(leading, 1, ids.shape[1])

    return accept


def accept_lengths_block(model: DemoModel, drafter: BlockDrafter, device: Device) -> AcceptFunction:
    """One block drafted at every anchor ``L >= 1``."""
    drafts = drafter.geo.num_drafts

    def accept(ids: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        every = torch.arange(1, length - drafts, device=ids.device)
        pieces = []
        with device.precision():
            taps = model(ids, drafter.geo.target_layer_ids).taps
            for part in every.split(64):
                anchors = part.expand(len(ids), -1)
                guess = predict(drafter, model.model.embed_tokens, taps, ids, anchors)
                offsets = torch.arange(1, drafts + 1, device=ids.device)
                truth = ids[:, part[:, None] + offsets]
                right = guess.logits.argmax(-1) == truth
                pieces.append(right.long().cumprod(-1).sum(-1))
        return _placed(torch.cat(pieces, dim=1), 1, length)

    return accept


def _placed(leading: torch.Tensor, first: int, length: int) -> torch.Tensor:
    full = leading.new_full((leading.shape[0], length), -1)
    full[:, first : first + leading.shape[1]] = leading
    return full


def walk(accepted: list[list[int]], starts: list[int], ends: list[int]) -> Acceptance:
    """Step through each row: a step at position ``L`` emits ``accepted[L] + 1`` tokens; steps that
    would reach beyond the row's end are not counted."""
    steps = tokens = 0
    for row, start, end in zip(accepted, starts, ends, strict=True):
        position = start
        while position < end and row[position] >= 0 and position + row[position] + 1 < end:
            tokens += row[position] + 1
            position += row[position] + 1
            steps += 1
    return Acceptance(round(tokens / steps, 3) if steps else 0.0, steps, tokens)


@torch.no_grad()
def evaluate(
    model: DemoModel,
    drafters: dict[str, BlockDrafter],
    corpus: Corpus,
    plan: Plan,
    seed: int,
    device: Device,
) -> Report:
    """Evaluate on held-out documents and held-out conversations."""
    bpb, predicted = bits_per_byte(model, corpus, plan.held_out_tokens, device)
    functions = {"mtp": accept_lengths_mtp(model, device)}
    for kind, drafter in drafters.items():
        functions[kind] = accept_lengths_block(model, drafter, device)
    chat = ChatWindows(corpus, seed)
    prompts = {
        "text": held_out_prompts(corpus, plan.eval_rows, plan.eval_prompt, seed),
        "chat": chat.prompts(0, plan.eval_rows, plan.eval_length * 3 // 4, held_out=True),
    }
    acceptance: dict[str, dict[str, Acceptance]] = {}
    samples: list[str] = []
    repeated = 0.0
    for name, openings in prompts.items():
        ids = continue_prompts(
            model, openings, plan.eval_length, torch.zeros(len(openings)),
            seed=seed, autocast=device.autocast, describe=f"evaluate {name}",
        )  # fmt: skip
        starts = [len(opening) for opening in openings]
        ends = [_end(row, start) for row, start in zip(ids.tolist(), starts, strict=True)]
        acceptance[name] = {
            kind: walk(
                [row for part in ids.split(ROWS_AT_ONCE) for row in accept(part).tolist()],
                starts, ends,
            )
            for kind, accept in functions.items()
        }  # fmt: skip
        if name == "text":
            repeated = _repeated_share(ids.tolist(), starts)
        for row, start, end in list(zip(ids.tolist(), starts, ends, strict=True))[:4]:
            decode = corpus.tokenizer.decode
            prompt = decode(row[:start], skip_special_tokens=False)
            answer = decode(row[start:end], skip_special_tokens=False)
            samples.append(f"{prompt[-240:]} >>> {answer}")
    return Report(round(bpb, 4), predicted, round(repeated, 3), acceptance, samples)


def _end(row: list[int], start: int) -> int:
    """One past the first end-of-turn token after ``start``, else the length."""
    return row.index(IM_END_ID, start) + 1 if IM_END_ID in row[start:] else len(row)


def _repeated_share(rows: list[list[int]], starts: list[int]) -> float:
    """Share of 8-token runs in the continuations that occurred earlier in the same continuation."""
    seen_before = total = 0
    for row, start in zip(rows, starts, strict=True):
        seen: set[tuple[int, ...]] = set()
        for position in range(start, len(row) - 7):
            run = tuple(row[position : position + 8])
            seen_before += run in seen
            total += 1
            seen.add(run)
    return seen_before / max(1, total)
