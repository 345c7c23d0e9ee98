"""The gates hold on this tree, and each one catches what it is there for."""

from __future__ import annotations

import textwrap

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.repo import load_script

register_cpu_ci(est_time=10, suite="unit")

sizes = load_script("scripts/check_sizes.py")
imports = load_script("scripts/check_imports.py")
types_gate = load_script("scripts/check_types.py")


def test_sizes_hold(capsys):
    assert sizes.main() == 0, capsys.readouterr().out


def test_every_exemption_has_a_reason():
    assert all(len(reason.split()) >= 4 for reason in sizes.EXEMPTIONS.values())


def _function(lines: int, decorator: str = "") -> str:
    head = f"{decorator}\n" if decorator else ""
    contract = '(\n    a,\n):\n    """Says what it does."""\n'
    return f"{head}def f{contract}" + "    x = 1\n" * lines


@pytest.mark.parametrize(
    ("source", "what"),
    [
        (_function(sizes.MAX_FUNCTION_LINES), None),
        (_function(sizes.MAX_FUNCTION_LINES + 1), "function"),
        (_function(sizes.MAX_KERNEL_LINES, "@triton.jit"), None),
        (_function(sizes.MAX_KERNEL_LINES + 1, "@triton.jit"), "function"),
        ("class C:\n" + "    x = 1\n" * sizes.MAX_CLASS_LINES, "class"),
        ("x = 1\n" * (sizes.MAX_FILE_LINES + 1), "file"),
    ],
)
def test_size_gate_catches(source, what):
    found = [finding.what for finding in sizes.check_source("x.py", source)]
    assert found == ([] if what is None else [what])


def test_size_gate_refuses_an_exemption_that_is_not_needed(monkeypatch, capsys):
    monkeypatch.setitem(sizes.EXEMPTIONS, "python/sglang/version.py", "it was longer once upon")
    assert sizes.main() == 1
    assert "python/sglang/version.py: the exemption is not needed" in capsys.readouterr().out


def test_imports_point_down(capsys):
    assert imports.main() == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("sglang.kernels.ops.gdn", "from sglang.srt.environ import envs"),
        ("sglang.kernels.ops.gdn", "from sglang import srt"),
        ("sglang.srt.mem_cache.pool.kv", "import sglang.srt.managers.scheduler"),
        ("sglang.srt.mem_cache.pool.kv", "from sglang.srt.model_executor import model_runner"),
        ("sglang.srt.managers.scheduler", "from ..entrypoints import http_server"),
        ("sglang.srt.layers.linear", "def f():\n    from sglang.srt.managers import scheduler"),
        ("sglang.srt.models.qwen", "from sglang.srt.mem_cache.radix_cache import RadixCache"),
        ("sglang.srt.configs.model_config", "from sglang.srt.layers import linear"),
        ("sglang.srt.server_args", "from sglang.test import repo"),
    ],
)
def test_import_gate_catches(module, line):
    assert len(imports.wrong_directions(imports.imports_of(module, line))) == 1


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("sglang.srt.managers.scheduler", "from sglang.srt.mem_cache import radix_cache"),
        ("sglang.srt.layers.linear", "import sglang.kernels.ops.gdn"),
        (
            "sglang.srt.mem_cache.x",
            "if TYPE_CHECKING:\n    from sglang.srt.managers.schedule_batch import Req",
        ),
    ],
)
def test_import_gate_allows(module, line):
    assert imports.wrong_directions(imports.imports_of(module, line)) == []


def test_torch_is_found_through_other_modules():
    sources = {
        "sglang.a": "from sglang.b import c",
        "sglang.b": "",
        "sglang.b.c": "import torch.nn",
        "sglang.lazy": "def f():\n    import torch",
    }
    graph = {name: imports.imports_of(name, source) for name, source in sources.items()}
    assert imports.torch_paths(graph, ["sglang.a"]) == ["torch <- sglang.b.c <- sglang.a"]
    assert imports.torch_paths(graph, ["sglang.lazy", "sglang.b", "sglang.not_there"]) == []


def test_type_gate_lists_what_exists():
    assert [p for p in types_gate.PUBLIC_EDGES if not (types_gate.ROOT / p).exists()] == []


def test_relative_imports_are_resolved():
    source = textwrap.dedent("from . import x\nfrom ..y import z\n")
    targets = {i.target for i in imports.imports_of("sglang.srt.a.b", source)}
    assert {"sglang.srt.a.x", "sglang.srt.y.z"} <= targets
    in_package = imports.imports_of("sglang.srt.a", "from . import x", is_package=True)
    assert "sglang.srt.a.x" in {i.target for i in in_package}


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
