"""Writes the finished checkpoints and reads them back."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from examples.demo_model.config import GENERATION_CONFIG
from examples.demo_model.corpus import Corpus
from examples.demo_model.drafters import BlockDrafter, build_drafter
from examples.demo_model.errors import DemoModelError
from examples.demo_model.model import DemoModel

TARGET_NAME = "demo"
DRAFT_NAMES = {"dflash": "demo-dflash", "dspark": "demo-dspark"}


@contextmanager
def whole_directory(target: Path) -> Iterator[Path]:
    """A scratch directory that replaces ``target`` when the block ends without an error."""
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield scratch
        shutil.rmtree(target, ignore_errors=True)
        os.chmod(scratch, 0o755)
        scratch.rename(target)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _save_weights(module: nn.Module, path: Path) -> None:
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in module.state_dict().items()
    }
    save_file(tensors, path, metadata={"format": "pt"})


def export_target(model: DemoModel, corpus: Corpus, out: Path) -> Path:
    """Write the target in the family's format; returns its directory."""
    with whole_directory(out / TARGET_NAME) as directory:
        _write_json(directory / "config.json", model.geo.to_config())
        _write_json(directory / "generation_config.json", GENERATION_CONFIG)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(corpus.directory / name, directory / name)
        _save_weights(model, directory / "model.safetensors")
    return out / TARGET_NAME


def export_drafter(drafter: BlockDrafter, out: Path) -> Path:
    """Write one draft checkpoint; returns its directory."""
    name = DRAFT_NAMES[drafter.geo.kind]
    with whole_directory(out / name) as directory:
        _write_json(directory / "config.json", drafter.geo.to_config())
        _save_weights(drafter, directory / "model.safetensors")
    return out / name


def load_weights(module: nn.Module, directory: Path) -> None:
    """Load exported weights into ``module``; every tensor must fit.

    Raises:
        DemoModelError: there is no checkpoint, or it is of another geometry.
    """
    path = directory / "model.safetensors"
    if not path.is_file():
        raise DemoModelError(f"{path} does not exist; train the models first")
    tensors = {name: tensor.float() for name, tensor in load_file(path).items()}
    try:
        module.load_state_dict(tensors)
    except RuntimeError as error:
        raise DemoModelError(f"{path} does not fit this program's geometry: {error}") from error


def load_target(plan_target: Any, out: Path, device: torch.device) -> DemoModel:
    model = DemoModel(plan_target)
    load_weights(model, out / TARGET_NAME)
    return model.to(device).requires_grad_(False)


def load_drafter(geometry: Any, out: Path, device: torch.device) -> BlockDrafter:
    drafter = build_drafter(geometry)
    load_weights(drafter, out / DRAFT_NAMES[geometry.kind])
    return drafter.to(device).requires_grad_(False)
