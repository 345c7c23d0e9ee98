"""Settings of every test: processes that a test starts import the same checkout as the test."""

from __future__ import annotations

import os
from pathlib import Path

_SOURCE = str(Path(__file__).resolve().parents[2] / "python")
_paths = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != _SOURCE]
os.environ["PYTHONPATH"] = os.pathsep.join([_SOURCE, *_paths])
