"""What a checkpoint says about its weight quantization. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

FP8_METHOD = "fp8"


def _normalise(path: str) -> str:
    """Strip the prefixes that differ between packs, so that list entries and tensor names compare."""
    path = path.removeprefix("model.").removeprefix("language_model.").removeprefix("model.")
    return path.strip(".")


def _occurs_on_dots(needle: str, path: str) -> bool:
    return f".{needle}." in f".{path}."


@dataclass(frozen=True)
class QuantizationConfig:
    """Block-scaled FP8 weights as the ``quantization_config`` of a checkpoint describes them.

    ``weight_block_size`` is (output rows, input columns) per scale. ``ignored_modules`` are module
    paths that the pack claims to have left unquantized; the tensors in the files decide.
    """

    method: str
    weight_block_size: tuple[int, int]
    ignored_modules: tuple[str, ...]

    @staticmethod
    def from_dict(raw: dict[str, Any]) -> QuantizationConfig:
        """Parse a ``quantization_config``.

        Raises:
            ValueError: the method, number format or block size is not supported.
        """
        method = str(raw.get("quant_method"))
        if method != FP8_METHOD:
            raise ValueError(
                f"quantization_config.quant_method={method!r} is not supported; "
                "use an fp8 (e4m3, 128x128 blocks) or an unquantized checkpoint"
            )
        fmt = raw.get("fmt", "e4m3")
        if fmt not in ("e4m3", "float8_e4m3fn"):
            raise ValueError(f"quantization_config.fmt={fmt!r} is not supported; only e4m3 is")
        block = raw.get("weight_block_size")
        if not isinstance(block, (list, tuple)) or len(block) != 2 or min(block) < 1:
            raise ValueError(
                f"quantization_config.weight_block_size={block!r} must be two positive sizes; "
                "per-tensor fp8 checkpoints are not supported"
            )
        ignored = raw.get("modules_to_not_convert") or raw.get("ignored_layers") or []
        return QuantizationConfig(method, (int(block[0]), int(block[1])), tuple(ignored))

    def is_ignored(self, module_path: str) -> bool:
        """True if the pack lists ``module_path``, a dotted prefix of it, or a part on dotted bounds.

        >>> q = QuantizationConfig("fp8", (128, 128), ("mlp.gate",))
        >>> q.is_ignored("model.layers.0.mlp.gate"), q.is_ignored("model.layers.0.mlp.gate_proj")
        (True, False)
        """
        path = _normalise(module_path)
        return any(_occurs_on_dots(_normalise(entry), path) for entry in self.ignored_modules)
