"""The losses of the stages: pretraining, chat, MTP and drafter distillation."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from examples.demo_model.batches import ChatWindows, TextWindows
from examples.demo_model.config import Phase, Plan
from examples.demo_model.corpus import Corpus
from examples.demo_model.drafters import BlockDrafter, build_drafter, predict
from examples.demo_model.generate import continue_prompts
from examples.demo_model.model import DemoModel
from examples.demo_model.optimise import BatchFunction, Device, Parts, Task, run_phase
from examples.demo_model.progress import Progress

MTP_DEPTH = 3
MTP_PRETRAIN_WEIGHTS = (0.2, 0.1, 0.05)
POSITION_DECAY = 0.85  # a later draft only counts if every earlier one was right
OWN_TEXT_SHARE = 0.75


def _cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor | None
) -> torch.Tensor:
    losses = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")
    if weight is None:
        return losses.mean()
    flat = weight.flatten().float()
    return (losses * flat).sum() / flat.sum().clamp_min(1)


def language_loss(
    model: DemoModel, ids: torch.Tensor, weight: torch.Tensor | None
) -> tuple[torch.Tensor, Parts]:
    """Next-token loss plus the MTP losses of a three-deep chain. ``weight`` ``[B, T]`` selects the
    tokens that are labels; None means all."""
    hidden = model(ids).hidden
    main = _cross_entropy(
        model.logits(hidden[:, :-1]), ids[:, 1:], None if weight is None else weight[:, 1:]
    )
    total = main
    parts = {"loss": main.detach()}
    for depth, output in enumerate(model.mtp_chain(hidden, ids, MTP_DEPTH)):
        rows = output.shape[1]
        labels = ids[:, depth + 2 : depth + 2 + rows]
        mask = None if weight is None else weight[:, depth + 2 : depth + 2 + rows]
        loss = _cross_entropy(model.logits(output), labels, mask)
        total = total + MTP_PRETRAIN_WEIGHTS[depth] * loss
        parts[f"mtp{depth + 1}"] = loss.detach()
    return total, parts


def distillation_loss(
    logits: torch.Tensor, teacher: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-row loss ``[...]`` against the teacher's distribution and its best token in equal parts,
    and whether the best tokens agree ``[...]``."""
    log_q = logits.float().log_softmax(-1)
    best = teacher.argmax(-1, keepdim=True)
    soft = -(teacher.float().softmax(-1) * log_q).sum(-1)
    hard = -log_q.gather(-1, best).squeeze(-1)
    return 0.5 * (soft + hard), logits.argmax(-1) == best.squeeze(-1)


def round_to_bf16(module: torch.nn.Module) -> None:
    """Give every parameter the value that the checkpoint will hold."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))


class DistillationText:
    """Rows for distillation: text the target wrote itself, mixed with corpus text."""

    def __init__(self, own: torch.Tensor, windows: TextWindows, seed: int) -> None:
        self._own, self._windows, self._seed = own, windows, seed

    def batch(self, step: int, phase: Phase) -> torch.Tensor:
        """``[rows, length]`` on the device of the own text."""
        own_rows = int(phase.rows * OWN_TEXT_SHARE)
        rng = np.random.default_rng((self._seed, 4, step))
        picks = torch.from_numpy(rng.integers(len(self._own), size=own_rows))
        own = self._own[picks.to(self._own.device)][:, : phase.length].long()
        other = self._windows.batch(step, phase.rows - own_rows, phase.length)
        return torch.cat([own, other.to(own.device)])


def train_target(
    corpus: Corpus, plan: Plan, seed: int, progress: Progress, device: Device
) -> DemoModel:
    """Pretraining, longer contexts, chat; the result is rounded to bf16 values."""
    torch.manual_seed(seed)
    model = DemoModel(plan.target).to(device.torch_device)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"target: {count / 1e6:.2f} M parameters", flush=True)
    text, chat = TextWindows(corpus, seed), ChatWindows(corpus, seed)

    def chat_batch(step: int) -> tuple[torch.Tensor, ...]:
        rows, length = plan.chat.rows, plan.chat.length
        chat_ids, mask = chat.batch(step, rows // 2, length)
        text_ids = text.batch(1_000_000 + step, rows - rows // 2, length)
        # Prompts of a conversation count a little, so that their form is learnt too.
        weight = torch.cat([mask + 0.1 * (1 - mask), torch.full(text_ids.shape, 0.3)])
        return torch.cat([chat_ids, text_ids]), weight

    def text_batch(phase: Phase) -> BatchFunction:
        return lambda step: (text.batch(step, phase.rows, phase.length),)

    def loss(ids: torch.Tensor, weight: torch.Tensor | None = None) -> tuple[torch.Tensor, Parts]:
        return language_loss(model, ids, weight)

    for name, phase, batch in (
        ("pretrain", plan.pretrain, text_batch(plan.pretrain)),
        ("long", plan.long_pretrain, text_batch(plan.long_pretrain)),
        ("chat", plan.chat, chat_batch),
    ):
        run_phase(Task(name, model, phase, batch, loss), progress, device, plan.save_every)
    round_to_bf16(model)
    return model.requires_grad_(False)


def write_own_text(
    model: DemoModel, corpus: Corpus, plan: Plan, seed: int, device: Device
) -> torch.Tensor:
    """Text the target writes after corpus and chat openings, ``[n, length]`` int16: three fifths
    greedily, the rest at temperatures 0.6 and 1."""
    windows, chat = TextWindows(corpus, seed), ChatWindows(corpus, seed)
    rows, length = plan.own_text_rows, plan.own_text_length
    written = []
    for number in tqdm(range(plan.own_text_batches), desc="own text", unit="batch"):
        rng = np.random.default_rng((seed, 5, number))
        openings = chat.prompts(number, rows // 4, length // 2, held_out=False)
        text_rows = windows.batch(2_000_000 + number, rows - len(openings), length // 4).numpy()
        openings += [row[: rng.integers(8, len(row) + 1)] for row in text_rows]
        heat = torch.from_numpy(rng.choice([0.0, 0.6, 1.0], size=rows, p=[0.6, 0.2, 0.2]))
        ids = continue_prompts(
            model, openings, length, heat.float(), seed=seed + number, autocast=device.autocast
        )
        written.append(ids.to(torch.int16))
    return torch.cat(written)


def train_mtp(
    model: DemoModel, text: DistillationText, plan: Plan, progress: Progress, device: Device
) -> None:
    """Distil the frozen target into its MTP block; the result is rounded to bf16 values."""
    model.mtp.requires_grad_(True)

    def batch(step: int) -> tuple[torch.Tensor, ...]:
        return (text.batch(step, plan.mtp),)

    def loss(ids: torch.Tensor) -> tuple[torch.Tensor, Parts]:
        with torch.no_grad():
            hidden = model(ids).hidden
            teacher = model.logits(hidden)
        total = torch.zeros((), device=ids.device)
        parts = {}
        for depth, output in enumerate(model.mtp_chain(hidden, ids, MTP_DEPTH)):
            rows = output.shape[1]
            target = teacher[:, depth + 1 : depth + 1 + rows]
            losses, agree = distillation_loss(model.logits(output), target)
            total = total + POSITION_DECAY**depth * losses.mean()
            parts[f"agree{depth + 1}"] = agree.float().mean()
        return total, parts

    task = Task("mtp", model, plan.mtp, batch, loss)
    run_phase(task, progress, device, plan.save_every)
    round_to_bf16(model)
    model.requires_grad_(False)


def train_drafter(
    kind: str,
    model: DemoModel,
    text: DistillationText,
    plan: Plan,
    seed: int,
    progress: Progress,
    device: Device,
) -> BlockDrafter:
    """Distil the frozen target into one block drafter; the result is rounded to bf16 values."""
    geo = plan.drafter_geometry(kind)
    torch.manual_seed(seed)
    drafter = build_drafter(geo).to(device.torch_device)
    count = sum(parameter.numel() for parameter in drafter.parameters())
    print(f"{kind}: {count / 1e6:.2f} M parameters", flush=True)
    phase, drafts = plan.drafter, geo.num_drafts
    weights = POSITION_DECAY ** torch.arange(drafts, device=device.torch_device)
    weights = weights / weights.sum()

    def batch(step: int) -> tuple[torch.Tensor, ...]:
        ids = text.batch(step, phase)
        return ids, random_anchors(ids, drafts, phase.length // 8, seed, step)

    def loss(ids: torch.Tensor, anchors: torch.Tensor) -> tuple[torch.Tensor, Parts]:
        with torch.no_grad():
            output = model(ids, geo.target_layer_ids)
            teacher = model.logits(output.hidden)
            offsets = torch.arange(drafts, device=ids.device)
            where = (anchors.unsqueeze(-1) + offsets).flatten(1)
            teacher = teacher.gather(1, where.unsqueeze(-1).expand(-1, -1, teacher.shape[-1]))
            teacher = teacher.unflatten(1, (-1, drafts))
        guess = predict(drafter, model.model.embed_tokens, output.taps, ids, anchors)
        losses, agree = distillation_loss(guess.logits, teacher)
        total = (losses * weights).sum(-1).mean()
        leading = agree.long().cumprod(-1).sum(-1).float().mean()
        parts = {"loss": total.detach(), "agree1": agree[..., 0].float().mean(), "leading": leading}
        if guess.confidence is not None:
            label = agree.float()
            total = total + F.binary_cross_entropy_with_logits(guess.confidence.float(), label)
        return total, parts

    run_phase(Task(kind, drafter, phase, batch, loss), progress, device, plan.save_every)
    round_to_bf16(drafter)
    return drafter.requires_grad_(False)


def random_anchors(
    ids: torch.Tensor, drafts: int, count: int, seed: int, step: int
) -> torch.Tensor:
    """``[B, count]`` positions, at least 1, with ``drafts`` tokens after each."""
    rng = np.random.default_rng((seed, 6, step))
    high = ids.shape[1] - drafts
    picks = rng.integers(1, high, size=(ids.shape[0], count))
    return torch.from_numpy(picks).to(ids.device)
