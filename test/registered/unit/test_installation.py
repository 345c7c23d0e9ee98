"""Two distributions that share an import name must not share an environment."""

from __future__ import annotations

import importlib.metadata

import pytest

from sglang.srt import installation
from sglang.srt.arg_groups.pipeline import run_resolution_pipeline
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="unit")


def test_stock_sglang_beside_us_is_refused_at_start(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", {"sglang": "0.5.21"}.__getitem__)
    with pytest.raises(RuntimeError, match=r"sglang 0\.5\.21 is installed here too.*pip uninstall"):
        run_resolution_pipeline(ServerArgs("dummy"))


def test_alone_we_start(monkeypatch):
    def version(name: str) -> str:
        if name == installation.OWN_DISTRIBUTION:
            return "0.1.0"
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert installation.stock_version() is None
    assert run_resolution_pipeline(ServerArgs("dummy")).is_resolved


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
