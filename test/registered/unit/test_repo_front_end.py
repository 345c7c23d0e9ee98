"""Importing what the front-end process uses must not bring torch in.

The gate reads the syntax tree; this imports for real, so that a third-party package which imports
torch is caught as well.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.repo import ROOT, load_script

register_cpu_ci(est_time=10, suite="unit")

HEAVY = ("torch", "transformers", "triton", "xgrammar", "matplotlib")

SCRIPT = """
import importlib, json, sys
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
    print(json.dumps([name, [h for h in json.loads(sys.argv[2]) if h in sys.modules]]))
"""


def imported_by(modules: list[str]) -> dict[str, list[str]]:
    """For each module, the heavy packages that are loaded once it has been imported."""
    command = [sys.executable, "-c", SCRIPT, json.dumps(modules), json.dumps(HEAVY)]
    done = subprocess.run(
        command, cwd=ROOT / "python", capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


def existing(modules: tuple[str, ...]) -> list[str]:
    base = ROOT / "python"
    paths = {name: base / name.replace(".", "/") for name in modules}
    return [n for n, p in paths.items() if p.is_dir() or p.with_suffix(".py").is_file()]


def test_front_end_modules_import_no_torch():
    gate = load_script("scripts/check_imports.py")
    modules = existing(gate.TORCH_FREE)
    assert "sglang.srt.server_args" in modules
    heavy = {name: found for name, found in imported_by(modules).items() if found}
    assert heavy == {}


def test_control_a_module_with_torch_is_seen():
    assert imported_by(["torch"]) == {"torch": ["torch"]}


def test_resolving_arguments_imports_no_torch(tmp_path):
    from sglang.test.args_fixtures import write_model_config

    model = write_model_config(tmp_path / "model")
    script = (
        "import sys\n"
        "from sglang.srt.arg_groups.pipeline import run_resolution_pipeline\n"
        "from sglang.srt.server_args import ServerArgs\n"
        f"args = run_resolution_pipeline(ServerArgs({model!r}, speculative_algorithm='NEXTN'))\n"
        "assert args.is_resolved and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT / "python", check=True, timeout=60)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
