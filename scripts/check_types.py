"""Type gate: mypy on the modules that others import from.

The list names the public edges. A module that is listed and missing fails, so the list stays true.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

PUBLIC_EDGES: tuple[str, ...] = (
    "python/sglang/cli",
    "python/sglang/demo.py",
    "python/sglang/kernels/ops/attention",
    "python/sglang/kernels/ops/cpu",
    "python/sglang/launch_server.py",
    "python/sglang/parity",
    "python/sglang/srt/arg_groups",
    "python/sglang/srt/configs",
    "python/sglang/srt/entrypoints/engine.py",
    "python/sglang/srt/entrypoints/http_server.py",
    "python/sglang/srt/environ.py",
    "python/sglang/srt/installation.py",
    "python/sglang/srt/managers/io_struct.py",
    "python/sglang/srt/runtime_context.py",
    "python/sglang/srt/sampling/sampling_params.py",
    "python/sglang/srt/server_args.py",
    "python/sglang/srt/utils",
    "python/sglang/test/ci",
    "python/sglang/test/test_utils.py",
)


def main() -> int:
    missing = [path for path in PUBLIC_EDGES if not (ROOT / path).exists()]
    if missing:
        print(f"listed in scripts/check_types.py but not there: {', '.join(missing)}")
        return 1
    command = [sys.executable, "-m", "mypy", *PUBLIC_EDGES]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
