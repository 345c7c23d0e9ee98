"""Stream a checkpoint's tensors straight into preallocated parameters."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from tqdm import tqdm

from sglang.kernels.ops.quantization.rows import FP8_DTYPE
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.quantization import QuantizationConfig
from sglang.srt.model_loader.checkpoint_files import SafetensorsFile, tensor_files
from sglang.srt.model_loader.dummy import load_dummy_weights
from sglang.srt.model_loader.fp8 import SCALE_SUFFIX, dequantize, is_fp8
from sglang.srt.model_loader.weight_slots import WeightSlots

logger = logging.getLogger(__name__)

# Tensors that a checkpoint may carry and that no model here reads, by ending.
UNUSED_ENDINGS = (
    "rotary_emb.inv_freq",
    ".k_proj.k_scale",
    ".v_proj.v_scale",
    ".attn.k_scale",
    ".attn.v_scale",
)
DUMMY = "dummy"
VISION_PREFIXES = ("model.visual.", "visual.")
_SHOWN_NAMES = 8
_GPU_WORKERS = 8


class LoadableModel(Protocol):
    """A model that says where tensors go. ``skipped_prefixes`` are another model's tensors."""

    config: ModelConfig
    skipped_prefixes: tuple[str, ...]

    def weight_slots(self) -> WeightSlots: ...

    def finish_loading(self) -> None: ...


def normalise_name(name: str) -> str:
    """Map every published prefix to ``model.``, ``lm_head.``, ``mtp.`` or ``model.visual.``.

    >>> normalise_name("model.language_model.layers.0.mlp.up_proj.weight")
    'model.layers.0.mlp.up_proj.weight'
    >>> normalise_name("language_model.lm_head.weight")
    'lm_head.weight'
    """
    for prefix, replacement in (
        ("model.language_model.", "model."),
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
        ("language_model.", "model."),
        ("visual.", "model.visual."),
    ):
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return name


@dataclass(frozen=True)
class WeightSource:
    """Where the weights of a server's models come from: ``--load-format`` and whether to show progress."""

    load_format: str = "auto"
    progress: bool = False

    def fill(
        self, model: LoadableModel, path: str, *, shared_with: nn.Module | None = None
    ) -> None:
        """Read the checkpoint at ``path``, or draw random weights where the format is dummy.

        ``shared_with`` is a filled model some of whose modules ``model`` uses. Raises: as load_weights.
        """
        if self.load_format != DUMMY:
            load_weights(model, path, progress=self.progress)
            return
        logger.warning(
            "--load-format dummy: %s gets random weights; its answers mean nothing", path
        )
        load_dummy_weights(model, shared_with=shared_with)
        model.finish_loading()


def load_weights(
    model: LoadableModel, path: str, *, progress: bool = False, num_workers: int | None = None
) -> None:
    """Fill ``model`` from the safetensors in the directory ``path``.

    Tensors are read, cut and copied once into their parameters; FP8 tensors are dequantised unless
    their module keeps them (``layers/fp8_linear.py``). A worker holds one tensor at a time; files are
    shared out over ``num_workers``, by default one on the CPU, where the copy is not what takes long.
    Raises:
        FileNotFoundError: no weights there, or an incomplete download.
        ValueError: a tensor is missing, unknown, of the wrong shape, or FP8 without its scale.
    """
    slots = model.weight_slots()
    index = _Index.of(tensor_files(path), model.config.quantization)
    wanted: dict[Path, list[str]] = {}
    unknown: list[str] = []
    skipped_vision = 0
    for raw_name, file in index.files.items():
        name = normalise_name(raw_name)
        skipped_vision += name.startswith(VISION_PREFIXES)
        if _is_skipped(name, model, slots):
            continue
        if name in slots.slots:
            wanted.setdefault(file, []).append(raw_name)
        else:
            unknown.append(raw_name)
    total = sum(map(len, wanted.values()))
    with tqdm(total=total, desc="Loading weights", unit="tensor", disable=not progress) as bar:
        workers = num_workers or _default_workers(slots)
        with ThreadPoolExecutor(workers, thread_name_prefix="load-weights") as pool:
            jobs = [pool.submit(_fill_from, index, names, slots, bar) for names in wanted.values()]
            try:
                for job in jobs:
                    job.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    seen = {normalise_name(name) for names in wanted.values() for name in names}
    _check_complete(slots.missing(seen), unknown, path)
    if skipped_vision:
        logger.info("Skipped %d vision tensors: this engine serves text only", skipped_vision)
    model.finish_loading()


def _default_workers(slots: WeightSlots) -> int:
    devices = {slot.copies[0][0].device.type for slot in slots.slots.values()}
    return 1 if devices == {"cpu"} else _GPU_WORKERS


def _fill_from(index: _Index, raw_names: list[str], slots: WeightSlots, bar: tqdm) -> None:
    """Fill the slots of tensors that lie in one file."""
    with _Reader(index) as reader, torch.no_grad():
        for raw_name in raw_names:
            name = normalise_name(raw_name)
            keep = slots.slots[name].copies[0][0].dtype == FP8_DTYPE
            tensor = reader.read_fp8(raw_name) if keep else reader.read(raw_name)
            _fill(slots, name, tensor, raw_name)
            bar.update()


def _is_skipped(name: str, model: LoadableModel, slots: WeightSlots) -> bool:
    if name in slots.ignored or name.endswith(UNUSED_ENDINGS):
        return True
    is_scale = name.endswith(SCALE_SUFFIX) and name not in slots.slots
    if is_scale and name.removesuffix(SCALE_SUFFIX) in slots.slots:
        return True
    return name.startswith(model.skipped_prefixes)


def _fill(slots: WeightSlots, name: str, tensor: Tensor, raw_name: str) -> None:
    slot = slots.slots[name]
    if tuple(tensor.shape) != slot.shape:
        raise ValueError(
            f"{raw_name} has shape {tuple(tensor.shape)}; config.json asks for {slot.shape}"
        )
    slot.fill(tensor)


def _check_complete(missing: list[str], unknown: list[str], path: str) -> None:
    problems = [
        f"{len(names)} {what}: {', '.join(names[:_SHOWN_NAMES])}"
        + (", ..." if len(names) > _SHOWN_NAMES else "")
        for what, names in (("missing tensors", missing), ("unknown tensors", unknown))
        if names
    ]
    if problems:
        raise ValueError(f"checkpoint {path!r} does not fit its config.json: {'; '.join(problems)}")


@dataclass(frozen=True)
class _Index:
    """Which file holds a tensor, in the order of the files' bytes."""

    files: dict[str, Path]
    quantization: QuantizationConfig | None

    @staticmethod
    def of(paths: list[Path], quantization: QuantizationConfig | None) -> _Index:
        files: dict[str, Path] = {}
        for path in paths:
            with SafetensorsFile(path) as file:
                files.update(dict.fromkeys(file.names, path))
        return _Index(files, quantization)


class _Reader:
    """Keeps one file open at a time and dequantises what the files themselves mark as FP8."""

    def __init__(self, index: _Index) -> None:
        self._names = index.files
        self._quantization = index.quantization
        self._file: SafetensorsFile | None = None

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._file is not None:
            self._file.__exit__(None, None, None)

    def _get(self, name: str) -> Tensor:
        path = self._names[name]
        if self._file is None or self._file.path != path:
            self.__exit__()
            self._file = SafetensorsFile(path)
        return self._file.read(name)

    def read_fp8(self, name: str) -> Tensor:
        """An FP8 tensor as stored, for a module that keeps it; its scale is a tensor of its own.

        Raises:
            ValueError: it is stored in another dtype, or has no scale.
        """
        tensor = self._get(name)
        if not is_fp8(tensor):
            raise ValueError(
                f"{name} is {tensor.dtype}, but this kind of module is kept in float8 on a GPU; use a "
                "pack that quantises all of them, or an unquantised one"
            )
        if name + SCALE_SUFFIX not in self._names:
            raise ValueError(f"{name} is float8 but {name + SCALE_SUFFIX} is missing")
        return tensor

    def read(self, name: str) -> Tensor:
        """The tensor as stored, or in fp32 if it is FP8 with a scale."""
        tensor = self._get(name)
        scale_name = name + SCALE_SUFFIX
        has_scale = scale_name in self._names
        if not is_fp8(tensor):
            if has_scale:
                raise ValueError(f"{scale_name} exists but {name} is {tensor.dtype}, not float8")
            return tensor
        if not has_scale:
            raise ValueError(f"{name} is float8 but {scale_name} is missing")
        block = self._quantization.weight_block_size if self._quantization else (128, 128)
        if self._quantization is not None and self._quantization.is_ignored(
            name.removesuffix(".weight")
        ):
            logger.warning(
                "%s is listed as unquantized but stored as float8; using its scale", name
            )
        return dequantize(tensor, self._get(scale_name), block, name=name)
