"""Command line: write a tiny random checkpoint of one supported architecture.

Example::

    python -m sglang.test.make_checkpoint --arch qwen3_5_moe --fp8 --seed 1 out/tiny-moe
"""

from __future__ import annotations

import argparse
import sys

from sglang.test.checkpoints import (
    ARCHITECTURES,
    CheckpointError,
    TinyGeometry,
    default_geometry,
    write_checkpoint,
)

make_checkpoint = write_checkpoint

__all__ = [
    "CheckpointError",
    "TinyGeometry",
    "default_geometry",
    "main",
    "make_checkpoint",
]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make_checkpoint", description=__doc__.split("\n")[0])
    parser.add_argument("out", help="directory to create")
    parser.add_argument("--arch", choices=ARCHITECTURES, required=True)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--bf16", dest="dtype", action="store_const", const="bf16")
    kind.add_argument("--fp32", dest="dtype", action="store_const", const="fp32")
    kind.add_argument("--fp8", dest="dtype", action="store_const", const="fp8")
    parser.set_defaults(dtype="bf16")
    parser.add_argument("--moe-layout", choices=("fused", "per-expert"), default=None)
    parser.add_argument("--mtp", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--shards", type=int, default=1, help="number of safetensors files")
    parser.add_argument("--wrapper", action="store_true", help="nest under a vision-language root")
    parser.add_argument("--tie", action="store_true", help="tie the head to the embedding")
    parser.add_argument("--scale-dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--overwrite", action="store_true")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = vars(_parser().parse_args(argv))
    out = options.pop("out")
    try:
        path = write_checkpoint(out, **options)
    except (CheckpointError, OSError) as error:
        print(f"make_checkpoint: {error}", file=sys.stderr)
        return 2
    print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
