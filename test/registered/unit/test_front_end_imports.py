"""The front end stays free of torch, which costs a second and 250 MB."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="unit")

HEAVY = ("torch", "transformers", "triton", "numpy")
CASES = {
    "package": "import sglang; sglang.__version__",
    "server": "import sglang.launch_server, sglang.srt.entrypoints.http_server",
    "engine": "import sglang; sglang.Engine",
    "command": "from sglang.cli.main import main; main(['version'])",
    "resolved front end": (
        "import sys; from pathlib import Path;"
        "from sglang.test.front_end_case import write_front_end_model;"
        "from sglang.srt.server_args import prepare_server_args;"
        "from sglang.srt.arg_groups.pipeline import run_resolution_pipeline;"
        "from sglang.srt.entrypoints.front_end import FrontEnd;"
        "model = write_front_end_model(Path(sys.argv[1]));"
        "FrontEnd(run_resolution_pipeline(prepare_server_args(['--model-path', str(model)])))"
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_no_heavy_import(name, tmp_path):
    """Catches an import that drags torch into the HTTP process."""
    check = (
        f"import sys; found = [m for m in {HEAVY!r} if m in sys.modules]; assert not found, found"
    )
    subprocess.run([sys.executable, "-c", f"{CASES[name]}\n{check}", str(tmp_path)], check=True)


def test_the_check_finds_torch():
    """Control: the same check fails when torch is there."""
    check = f"import sys, numpy; assert not [m for m in {HEAVY!r} if m in sys.modules]"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True)
    assert done.returncode != 0


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
