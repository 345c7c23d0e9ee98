"""The state of an unfinished run: saved whole or not at all, and only continued by the same run."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from examples.demo_model.config import Plan
from examples.demo_model.errors import DemoModelError


class Progress:
    """Directory ``.progress`` inside the output directory; one file a stage."""

    def __init__(self, out: Path, plan: Plan, seed: int, tokenizer_file: Path) -> None:
        self.directory = out / ".progress"
        digest = hashlib.sha256(f"{plan!r}|{seed}|".encode() + tokenizer_file.read_bytes())
        self._fingerprint = digest.hexdigest()

    def load(self, stage: str, device: torch.device) -> dict[str, Any] | None:
        """What :meth:`save` stored last for ``stage``, or None.

        Raises:
            DemoModelError: it belongs to a run with another plan, seed or tokenizer.
        """
        path = self.directory / f"{stage}.pt"
        if not path.is_file():
            return None
        try:
            state = torch.load(path, map_location=device, weights_only=True)
        except (RuntimeError, EOFError, OSError) as error:
            raise DemoModelError(f"{path} cannot be read ({error}); delete it and rerun") from error
        if state["fingerprint"] != self._fingerprint:
            raise DemoModelError(
                f"{self.directory} holds the progress of a run with another plan, seed or "
                "tokenizer; delete that directory or choose another --out"
            )
        return state

    def save(self, stage: str, step: int, module: nn.Module, optimizer: dict[str, Any]) -> None:
        """``optimizer`` is empty once the stage is finished."""
        self.directory.mkdir(parents=True, exist_ok=True)
        state = {
            "fingerprint": self._fingerprint,
            "step": step,
            "module": module.state_dict(),
            "optimizer": optimizer,
        }
        scratch = self.directory / f".{stage}.pt.partial"
        torch.save(state, scratch)
        os.replace(scratch, self.directory / f"{stage}.pt")
