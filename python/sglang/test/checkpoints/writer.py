"""Writes a tiny checkpoint: all of it or nothing."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sglang.bundled import bundled_directory
from sglang.test.checkpoints.geometry import (
    ARCHITECTURES,
    END_OF_TEXT_ID,
    IM_END_ID,
    TinyGeometry,
    build_config,
    default_geometry,
)
from sglang.test.checkpoints.quantize import is_quantised, quantize_blockwise
from sglang.test.checkpoints.tensors import random_tensor, split_experts, tensor_shapes

DTYPES = ("bf16", "fp32", "fp8")
MOE_LAYOUTS = ("fused", "per-expert")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_SCALE_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class CheckpointError(ValueError):
    """A request for a checkpoint that cannot exist, or a place that it cannot be written to."""


def write_checkpoint(
    out: str | os.PathLike[str],
    *,
    arch: str = "qwen3_5",
    dtype: str = "bf16",
    seed: int = 0,
    moe_layout: str | None = None,
    mtp: bool = True,
    shards: int = 1,
    wrapper: bool = False,
    tie: bool = False,
    scale_dtype: str = "bf16",
    geometry: TinyGeometry | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a tiny random checkpoint to the directory ``out`` and return its path.

    Args:
        arch: one of ``qwen3_5``, ``qwen3_5_moe``, ``qwen3_next``.
        dtype: ``bf16``, ``fp32`` or ``fp8`` (block-wise e4m3, the rest in bf16).
        seed: equal seeds give equal weights, whatever the shards, MoE layout and wrapper.
        moe_layout: ``fused`` or ``per-expert``; by default what the family ships: per-expert for
            ``qwen3_next`` and for FP8, else fused. FP8 has no fused form.
        mtp: include ``mtp.*``.
        shards: number of safetensors files; more than 1 adds ``model.safetensors.index.json``.
        wrapper: nest the text model as the vision-language checkpoints do.
        tie: tie the head to the embedding (no ``lm_head.weight``).
        scale_dtype: dtype of ``weight_scale_inv``, ``bf16`` or ``fp32``.
        overwrite: replace an existing ``out``, if it is a checkpoint or an empty directory.

    Raises:
        CheckpointError: an impossible combination, or ``out`` exists and may not be replaced.
    """
    layout = _check(arch, dtype, moe_layout, shards, wrapper, scale_dtype)
    target = Path(out)
    if target.exists():
        _check_replaceable(target, overwrite)
    geo = geometry or default_geometry(dtype)
    tensors = _build_tensors(
        tensor_shapes(arch, geo, tie=tie, mtp=mtp, wrapper=wrapper),
        dtype=dtype,
        seed=seed,
        layout=layout,
        scale_dtype=_SCALE_DTYPES[scale_dtype],
    )
    if shards > len(tensors):
        raise CheckpointError(f"shards is {shards}, but there are only {len(tensors)} tensors")
    config = build_config(arch, geo, dtype=dtype, tie=tie, mtp=mtp, wrapper=wrapper)

    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _write_files(scratch, config, tensors, shards)
        if target.exists():
            shutil.rmtree(target)
        scratch.rename(target)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return target


def _check(
    arch: str, dtype: str, moe_layout: str | None, shards: int, wrapper: bool, scale_dtype: str
) -> str:
    _one_of("arch", arch, ARCHITECTURES)
    _one_of("dtype", dtype, DTYPES)
    _one_of("scale_dtype", scale_dtype, tuple(_SCALE_DTYPES))
    if shards < 1:
        raise CheckpointError(f"shards must be at least 1, not {shards}")
    if wrapper and arch == "qwen3_next":
        raise CheckpointError("wrapper does not exist for qwen3_next: its text model is the root")
    per_expert_by_default = dtype == "fp8" or arch == "qwen3_next"
    layout = moe_layout or ("per-expert" if per_expert_by_default else "fused")
    _one_of("moe_layout", layout, MOE_LAYOUTS)
    if layout == "fused" and dtype == "fp8" and arch != "qwen3_5":
        raise CheckpointError("moe_layout fused does not exist in FP8 packs; use per-expert")
    return layout


def _check_replaceable(target: Path, overwrite: bool) -> None:
    if not overwrite:
        raise CheckpointError(f"{target} exists; choose another directory or pass overwrite")
    is_checkpoint = target.is_dir() and (target / "config.json").is_file()
    if not is_checkpoint and not (target.is_dir() and not any(target.iterdir())):
        raise CheckpointError(f"{target} is not a checkpoint and is kept; choose another directory")


def _one_of(field: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise CheckpointError(f"{field} must be one of {', '.join(allowed)}, not {value!r}")


def _build_tensors(
    shapes: dict[str, tuple[int, ...]],
    *,
    dtype: str,
    seed: int,
    layout: str,
    scale_dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    plain = torch.float32 if dtype == "fp32" else torch.bfloat16
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        seed_name = name.replace("model.language_model.", "model.")
        values = random_tensor(seed_name, shape, seed)
        is_fused_expert = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
        if is_fused_expert and layout == "per-expert":
            parts = list(split_experts(name, values))
        else:
            parts = [(name, values)]
        for part_name, part in parts:
            if dtype == "fp8" and is_quantised(part_name):
                weight, scale = quantize_blockwise(part, scale_dtype)
                tensors[part_name] = weight
                tensors[part_name.removesuffix("weight") + "weight_scale_inv"] = scale
            else:
                tensors[part_name] = part.to(plain)
    return tensors


def _write_files(
    directory: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], shards: int
) -> None:
    _write_json(directory / "config.json", config)
    _write_json(
        directory / "generation_config.json",
        {
            "bos_token_id": END_OF_TEXT_ID,
            "do_sample": False,
            "eos_token_id": [IM_END_ID, END_OF_TEXT_ID],
            "pad_token_id": END_OF_TEXT_ID,
        },
    )
    tokenizer_home = bundled_directory("demo")
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer_home / name, directory / name)
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for index, names in enumerate(_split_names(tensors, shards), start=1):
        file_name = f"model-{index:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names}
        save_file(part, directory / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file_name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index_content = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(directory / "model.safetensors.index.json", index_content)


def _split_names(tensors: dict[str, torch.Tensor], shards: int) -> list[list[str]]:
    """Names in order, cut into ``shards`` non-empty runs of about equal byte size."""
    total = sum(tensor.nbytes for tensor in tensors.values())
    groups: list[list[str]] = [[]]
    written, left = 0, len(tensors)
    for name, tensor in tensors.items():
        missing = shards - len(groups)
        full = written >= total * len(groups) / shards
        if groups[-1] and missing and (full or left <= missing):
            groups.append([])
        groups[-1].append(name)
        written += tensor.nbytes
        left -= 1
    return groups


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
