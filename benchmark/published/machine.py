"""What a result was measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from typing import Any

PACKAGES = ("torch", "triton", "fla-core", "flashinfer-python", "numpy", "aiohttp")


def describe_machine() -> dict[str, Any]:
    """GPU, driver, processor and versions; touches no GPU memory."""
    return {
        "gpu": _gpu(),
        "cpu": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "commit": _output("git", "rev-parse", "--short", "HEAD"),
    }


def _gpu() -> str | None:
    fields = "name,driver_version,memory.total"
    found = _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader")
    return found.splitlines()[0] if found else None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
