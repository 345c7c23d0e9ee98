"""CI registration, the test base class and platform helpers, as outside test files use them."""

from __future__ import annotations

import inspect
import sys
import unittest

import pytest

from sglang.srt import utils
from sglang.srt.environ import envs
from sglang.test.ci import ci_register
from sglang.test.ci.ci_register import (
    CIRegistry,
    HWBackend,
    auto_partition,
    collect_tests,
    register_cpu_ci,
    ut_parse_one_file,
)
from sglang.test.test_utils import CustomTestCase, is_in_ci, maybe_stub_sgl_kernel

register_cpu_ci(est_time=3, suite="unit")

BACKENDS = ("cpu", "cuda", "amd", "npu", "xpu", "musa", "mlx", "mps", "ppu")
FEATURE = '''"""A test of the feature."""
from sglang.test.ci.ci_register import register_amd_ci, register_cuda_ci

register_cuda_ci(est_time=40, stage="base-b", runner_config="1-gpu-large")
register_amd_ci(est_time=60, suite="stage-b-test-1-gpu-large-amd")
register_amd_ci(60, "stage-b-test-1-gpu-small-amd-mi35x", False, "no runner")

if __name__ == "__main__":
    raise RuntimeError("reading the file must not run it")
    unittest.main()
'''


@pytest.mark.parametrize("name", BACKENDS)
def test_registration_calls(name):
    function = getattr(ci_register, f"register_{name}_ci")
    parameters = inspect.signature(function).parameters
    assert [(p.name, p.default) for p in parameters.values()] == [
        ("est_time", inspect.Parameter.empty),
        ("suite", None),
        ("nightly", False),
        ("disabled", None),
        ("stage", None),
        ("runner_config", None),
    ]
    keyword_only = [p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert keyword_only == ["stage", "runner_config"]
    assert function(5, "x") is None and function(5, stage="a", runner_config="b") is None
    assert HWBackend[name.upper()]


def test_reading_a_file(tmp_path):
    """Catches: an import of the file; a suite name built differently; positional values lost."""
    path = tmp_path / "test_feature.py"
    path.write_text(FEATURE)
    found = ut_parse_one_file(str(path))
    assert [r.effective_suite for r in found] == [
        *("base-b-test-1-gpu-large", "stage-b-test-1-gpu-large-amd"),
        "stage-b-test-1-gpu-small-amd-mi35x",
    ]
    assert [r.backend for r in found] == [HWBackend.CUDA, HWBackend.AMD, HWBackend.AMD]
    assert [r.est_time for r in found] == [40, 60, 60]
    assert found[2].disabled == "no runner" and found[2].nightly is False
    assert len(collect_tests([str(path)])) == 3


@pytest.mark.parametrize(
    "call",
    [
        "register_cpu_ci(est_time=1)",
        'register_cpu_ci(est_time=1, suite="a", stage="b", runner_config="c")',
        'register_cpu_ci(est_time=1, stage="b")',
        'register_cpu_ci(est_time=1, suite="a", runner_config="c")',
    ],
)
def test_exactly_one_way_to_name_a_suite(call, tmp_path):
    path = tmp_path / "test_x.py"
    path.write_text(f"{call}\nif __name__ == '__main__':\n    main()\n")
    with pytest.raises(ValueError):
        ut_parse_one_file(str(path))


def test_files_need_registration_and_main(tmp_path):
    bare, silent = tmp_path / "test_bare.py", tmp_path / "test_silent.py"
    bare.write_text("if __name__ == '__main__':\n    main()\n")
    silent.write_text('register_cpu_ci(est_time=1, suite="a")\n')
    for path in (bare, silent):
        with pytest.raises(ValueError, match=path.name):
            collect_tests([str(path)])
    assert collect_tests([str(bare)], sanity_check=False) == []


def test_partition():
    tests = [
        CIRegistry(backend=HWBackend.CPU, filename=f"{i}", est_time=i + 1, suite="a")
        for i in range(7)
    ]
    parts = [auto_partition(tests, rank, 3) for rank in range(3)]
    assert sorted(t.filename for part in parts for t in part) == [str(i) for i in range(7)]
    measured = auto_partition(tests, 0, 2, live_est={"0": 100.0})
    assert [t.filename for t in measured] == ["0"]


def run(case: type[unittest.TestCase]) -> unittest.TestResult:
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    return result


def test_failed_set_up_class_is_torn_down():
    calls = []

    class Broken(CustomTestCase):
        @classmethod
        def setUpClass(cls):
            calls.append("up")
            raise RuntimeError("broken")

        @classmethod
        def tearDownClass(cls):
            calls.append("down")

        def test_one(self):
            calls.append("test")

    class Child(Broken):
        pass

    for case in (Broken, Child):
        calls.clear()
        assert len(run(case).errors) == 1 and calls == ["up", "down"]


@pytest.mark.parametrize(
    ("retries", "in_ci", "runs"), [(2, False, 3), (None, True, 2), (None, False, 1), (0, True, 1)]
)
def test_retries(retries, in_ci, runs):
    """Catches: another number of runs; a skip retried or turned into a failure."""
    seen = []

    class Case(CustomTestCase):
        def setUp(self):
            pass

        def test_fails(self):
            seen.append(1)
            self.assertEqual(1, 2)

        def test_skips(self):
            self.skipTest("not here")

    with envs.SGLANG_TEST_MAX_RETRY.override(retries), envs.SGLANG_IS_IN_CI.override(in_ci):
        assert is_in_ci() is in_ci
        result = run(Case)
    assert len(seen) == runs and len(result.skipped) == 1
    assert len(result.errors) + len(result.failures) == 1
    if runs > 1:
        assert len(result.errors) == 1 and "Exception" in result.errors[0][1]


def test_a_second_run_may_pass(capsys):
    seen = []

    class Case(CustomTestCase):
        def test_flaky(self):
            seen.append(1)
            self.assertGreater(len(seen), 1)

    with envs.SGLANG_TEST_MAX_RETRY.override(1):
        assert run(Case).wasSuccessful()
    assert "test_flaky" in capsys.readouterr().out


def test_stub_of_sgl_kernel(monkeypatch):
    monkeypatch.delitem(sys.modules, "sgl_kernel", raising=False)
    maybe_stub_sgl_kernel()
    import sgl_kernel

    assert sys.modules["sgl_kernel"] is sgl_kernel
    monkeypatch.delitem(sys.modules, "sgl_kernel")


@pytest.mark.parametrize(
    "name", "is_cuda is_hip is_cpu is_npu is_xpu is_sm90_supported is_gfx95_supported".split()
)
def test_platform_questions(name):
    assert isinstance(getattr(utils, name)(), bool)


def test_device_names():
    assert isinstance(utils.get_device(), str)
    assert isinstance(utils.get_device_sm(), int)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_USE_CPU_ENGINE", "1")
        assert utils.get_device() == "cpu"


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
