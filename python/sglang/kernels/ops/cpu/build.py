"""Compile the CPU kernels on first use, once per source, compiler and CPU."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE_DIR = Path(__file__).parent / "csrc"
MAIN_SOURCE = SOURCE_DIR / "kernels.cpp"
COMPILERS = ("c++", "g++", "clang++")
# No contraction: a fused multiply-add happens where the source says so and nowhere else.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fPIC",
    "-shared",
    "-pthread",
)
TIMEOUT_S = 300


class BuildError(RuntimeError):
    """No compiler, or the compiler refused the sources; the message says which."""


def find_compiler() -> str:
    """Path of the first C++ compiler found; ``CXX`` wins.

    Raises:
        BuildError: there is none.
    """
    wanted = os.environ.get("CXX")
    for name in (wanted, *COMPILERS) if wanted else COMPILERS:
        path = shutil.which(name)
        if path:
            return path
    raise BuildError(f"no C++ compiler found (looked for {', '.join(COMPILERS)})")


def cache_dir() -> Path:
    """Per-user directory of compiled kernels; ``SGLANG_CPU_KERNEL_CACHE`` overrides it."""
    override = os.environ.get("SGLANG_CPU_KERNEL_CACHE")
    if override:
        return Path(override)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "sglang-lossless" / "cpu-kernels"


def _cpu_identity() -> str:
    """What -march=native depends on."""
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return f"{platform.machine()} {platform.processor()}"
    keys = ("flags", "Features", "model name", "cpu family", "model\t")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
    chosen = {line for line in lines if line.startswith(keys)}
    return "\n".join(sorted(chosen))


def _digest(compiler: str) -> str:
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=True, timeout=TIMEOUT_S
    ).stdout
    sources = sorted(SOURCE_DIR.glob("*.h")) + [MAIN_SOURCE]
    digest = hashlib.sha256()
    for part in (version, " ".join(FLAGS), _cpu_identity(), platform.machine()):
        digest.update(part.encode() + b"\0")
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


def build() -> Path:
    """Return the shared library for this machine, compiling it if it is not cached.

    The file appears atomically, so processes that build at the same time do not disturb each other.
    Raises:
        BuildError: no compiler, a compile error, or no writable cache directory.
    """
    compiler = find_compiler()
    try:
        directory = cache_dir()
        directory.mkdir(parents=True, exist_ok=True)
        target = directory / f"kernels-{_digest(compiler)}.so"
        if target.is_file():
            return target
        handle, partial = tempfile.mkstemp(dir=directory, suffix=".partial")
        os.close(handle)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"cannot prepare the CPU kernel cache: {error}") from error
    command = [compiler, *FLAGS, str(MAIN_SOURCE), "-o", partial]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        if done.returncode != 0:
            raise BuildError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
        os.chmod(partial, 0o755)
        os.replace(partial, target)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{' '.join(command)} failed: {error}") from error
    finally:
        if os.path.exists(partial):
            os.unlink(partial)
    return target
