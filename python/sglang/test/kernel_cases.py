"""Run a file of kernel checks in a process of its own, because Triton reads its mode once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_cases(test_file: str, cases: str, **env: str) -> None:
    """Run ``cases``, a file beside ``test_file``, with ``env``; it must pass without a skip."""
    path = Path(test_file).with_name(cases)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--import-mode=importlib", str(path)]
    done = subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, timeout=400
    )
    report = done.stdout + done.stderr
    assert done.returncode == 0, report[-6000:]
    assert " passed" in report and " skipped" not in report, report[-2000:]
