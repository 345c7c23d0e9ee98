"""How many steps to draft, decided at run time from acceptance and batch size."""

from __future__ import annotations

import bisect
import json
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

DEFAULT_SLOTS: dict[str, dict[str, Any]] = {
    "1": {"candidate_steps": [1, 3, 5, 7], "down_hysteresis": -0.25},
    "8": {"candidate_steps": [0, 1, 3]},
    "32": {"candidate_steps": [0, 1]},
    "64": {"candidate_steps": [0]},
}


@dataclass(frozen=True)
class SlotConfig:
    """Rules for one range of batch sizes. Hystereses are in accepted drafts, intervals in batches."""

    candidate_steps: tuple[int, ...] = ()
    up_hysteresis: float = 0.0
    down_hysteresis: float = 0.0
    ceiling_coeff: float = 0.0
    ema_alpha: float = 0.2
    update_interval: int = 5
    warmup_batches: int = 10


_KEYS = {field.name for field in fields(SlotConfig)}


@dataclass(frozen=True)
class AdaptiveConfig:
    """Slots by least batch size, ascending."""

    slots: tuple[tuple[int, SlotConfig], ...]

    @property
    def union(self) -> tuple[int, ...]:
        """Every number of steps that some slot may choose, ascending."""
        return tuple(sorted({s for _, slot in self.slots for s in slot.candidate_steps}))

    @staticmethod
    def load(path: str | None) -> AdaptiveConfig:
        """Read ``--speculative-adaptive-config``; the built-in table without one.

        Raises: ValueError naming the key, FileNotFoundError.
        """
        if path is None:
            return AdaptiveConfig.from_dict(DEFAULT_SLOTS)
        try:
            return AdaptiveConfig.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(f"--speculative-adaptive-config {path}: {error}") from error

    @staticmethod
    def from_dict(raw: dict[str, Any]) -> AdaptiveConfig:
        """Integer-string keys are batch sizes; the other keys are defaults shared by all of them."""
        if not isinstance(raw, dict):
            raise ValueError("the top level must be an object")
        shared = _read_slot(SlotConfig(), {k: v for k, v in raw.items() if not k.isdigit()}, "")
        sizes = sorted((int(key), key) for key in raw if key.isdigit())
        if not sizes:
            sizes = [(1, "")]
        slots = []
        for size, key in sizes:
            slot = _read_slot(shared, raw[key], f"{key}.") if key else shared
            if not slot.candidate_steps:
                raise ValueError(f"{key or 'the file'} has no candidate_steps, for example [1, 3]")
            slots.append((size, slot))
        return AdaptiveConfig(tuple(slots))


def _read_slot(base: SlotConfig, raw: dict[str, Any], where: str) -> SlotConfig:
    unknown = sorted(set(raw) - _KEYS)
    if unknown:
        raise ValueError(f"unknown key {where}{unknown[0]}; known are {', '.join(sorted(_KEYS))}")
    values = dict(raw)
    if "candidate_steps" in values:
        steps = values["candidate_steps"]
        if not isinstance(steps, list) or any(not isinstance(s, int) or s < 0 for s in steps):
            raise ValueError(f"{where}candidate_steps={steps!r} must be a list of integers >= 0")
        values["candidate_steps"] = tuple(sorted(set(steps)))
    slot = replace(base, **values)
    if not 0 < slot.ema_alpha <= 1 or slot.update_interval < 1 or slot.warmup_batches < 0:
        raise ValueError(
            f"{where}ema_alpha={slot.ema_alpha} must lie in (0, 1], update_interval="
            f"{slot.update_interval} be at least 1, warmup_batches={slot.warmup_batches} at least 0"
        )
    return slot


class _Slot:
    """Steps in use and the moving average of accepted drafts, for one range of batch sizes."""

    def __init__(self, config: SlotConfig, start: int | None) -> None:
        self.config = config
        steps = config.candidate_steps
        self.index = steps.index(start) if start in steps else len(steps) // 2
        self.ema = float(self.steps - 1)
        self.num_batches = 0

    @property
    def steps(self) -> int:
        return self.config.candidate_steps[self.index]

    def observe(self, mean_correct: float) -> None:
        config = self.config
        if self.steps > 0:
            self.ema += config.ema_alpha * (mean_correct - self.ema)
        self.num_batches += 1
        since = self.num_batches - config.warmup_batches
        if since > 0 and since % config.update_interval == 0:
            self._decide()

    def _decide(self) -> None:
        candidates, before = self.config.candidate_steps, self.index
        if self.steps == 0:
            self._probe()
            return
        while self.index > 0 and self.ema <= self._down_limit():
            self.index -= 1
        if self.index == before:
            last = len(candidates) - 1
            while self.index < last and self.ema > self.steps - 0.5 + self.config.up_hysteresis:
                self.index += 1
        if self.config.ceiling_coeff > 0 and self.index <= before:
            limit = max(1, math.ceil(self.ema * self.config.ceiling_coeff))
            highest = bisect.bisect_right(candidates, limit) - 1
            self.index = min(self.index, max(highest, 0))

    def _down_limit(self) -> float:
        below = self.config.candidate_steps[self.index - 1]
        base = 0.5 if below == 0 else below - 0.5
        return base + self.config.down_hysteresis

    def _probe(self) -> None:
        """Without drafts nothing can be measured, so try one candidate more from time to time."""
        if self.index + 1 >= len(self.config.candidate_steps):
            return
        self.index += 1
        if self.ema < 0:
            self.ema = float(self.steps - 1)


class StepPolicy:
    """Chooses the number of draft steps of a batch and learns from what was accepted.

    ``num_steps`` is where every slot that lists it starts.
    Raises: ValueError if no slot lists it.
    """

    def __init__(self, config: AdaptiveConfig, num_steps: int | None) -> None:
        union = config.union
        if num_steps is not None and num_steps not in union:
            raise ValueError(
                f"--speculative-num-steps {num_steps} is not among the candidate steps "
                f"{list(union)} of --speculative-adaptive; use one of them"
            )
        start = union[len(union) // 2] if num_steps is None else num_steps
        self.max_steps = union[-1]
        self._sizes = [size for size, _ in config.slots]
        self._slots = [_Slot(slot, start) for _, slot in config.slots]

    def steps_for(self, batch_size: int) -> int:
        return self._slot(batch_size).steps

    def observe(self, batch_size: int, mean_correct: float) -> None:
        """One verify of ``batch_size`` requests accepted ``mean_correct`` drafts each."""
        self._slot(batch_size).observe(mean_correct)

    def _slot(self, batch_size: int) -> _Slot:
        return self._slots[max(0, bisect.bisect_right(self._sizes, batch_size) - 1)]
