"""The `sglang` command: lists what exists, refuses the rest, imports late."""

from __future__ import annotations

import subprocess
import sys

import pytest

import sglang
from sglang.cli.main import COMMANDS, Command, main
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit")


def test_version(capsys):
    """Catches a version that differs from the package's."""
    assert main(["version"]) == 0
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.split() == [sglang.__version__] * 2


def test_usage_lists_what_exists(capsys, monkeypatch):
    """Catches a command in the help that this build does not have."""
    monkeypatch.setitem(COMMANDS, "ghost", Command("sglang.no_such_module:main", "nothing"))
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert "serve" in listed and "ghost" not in listed
    assert main(["ghost"]) == 2
    assert "no command 'ghost'" in capsys.readouterr().err
    assert main([]) == 2


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if command.exists])
def test_every_command_has_help(name):
    """Catches a target that cannot be imported or called."""
    if name == "version":
        return
    done = subprocess.run(
        [sys.executable, "-m", "sglang.cli", name, "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout


def test_serving_without_a_model_says_what_is_missing(capsys):
    """Catches a traceback where a sentence is wanted."""
    assert main(["serve"]) == 2
    assert "--model-path is needed" in capsys.readouterr().err


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
