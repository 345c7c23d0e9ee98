"""Registrations are read without importing the file; what cannot be read is an error."""

from __future__ import annotations

import textwrap
import unittest

import pytest

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
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=2, suite="unit")

MAIN = 'if __name__ == "__main__":\n    run()\n'


@pytest.fixture
def write(tmp_path):
    def write_file(body: str, name: str = "test_x.py") -> str:
        path = tmp_path / name
        path.write_text(textwrap.dedent(body), encoding="utf-8")
        return str(path)

    return write_file


def test_every_backend_has_a_call_that_does_nothing():
    for backend in HWBackend:
        call = vars(ci_register)[f"register_{backend.name.lower()}_ci"]
        assert call(1.0, "unit") is None


def test_reads_calls_without_running_the_file(write):
    path = write(
        """
        raise RuntimeError("must not run")
        register_cpu_ci(12.5, "unit", nightly=True, disabled="flaky")
        ci_register.register_cuda_ci(est_time=40, stage="base-b", runner_config="1-gpu-large")
        """
    )
    cpu, cuda = ut_parse_one_file(path)
    assert cpu == CIRegistry(HWBackend.CPU, path, 12.5, "unit", True, "flaky")
    assert (cuda.backend, cuda.effective_suite) == (HWBackend.CUDA, "base-b-test-1-gpu-large")


@pytest.mark.parametrize(
    "call",
    [
        "register_cpu_ci(est_time=1)",
        "register_cpu_ci(suite='unit')",
        "register_cpu_ci(est_time=1, stage='base-b')",
        "register_cpu_ci(est_time=1, suite='unit', stage='a', runner_config='b')",
        "register_cpu_ci(est_time=1, suite='unit', runner_config='b')",
        "register_cpu_ci(est_time=SECONDS, suite='unit')",
        "register_cpu_ci(est_time=1, suite='unit', extra=1)",
        "register_cpu_ci(1, 'unit', False, None, 'more')",
    ],
)
def test_wrong_registrations_name_file_and_line(call, write):
    path = write(f"\n{call}\n")
    with pytest.raises(ValueError, match=r"test_x\.py:2: register_cpu_ci"):
        ut_parse_one_file(path)


def test_collect_names_files_that_would_never_run(write):
    good = write(f"register_cpu_ci(1, 'unit')\n{MAIN}", "test_good.py")
    no_registration = write(MAIN, "test_none.py")
    no_main = write("register_cpu_ci(1, 'unit')\n", "test_no_main.py")
    empty_main = write(
        "register_cpu_ci(1, 'unit')\nif __name__ == '__main__':\n    pass\n", "test_empty.py"
    )
    assert len(collect_tests([good])) == 1
    for bad in (no_registration, no_main, empty_main):
        with pytest.raises(ValueError, match=bad):
            collect_tests([good, bad])
    assert len(collect_tests([good, no_main, no_registration], sanity_check=False)) == 2


def _tests(*seconds: float) -> list[CIRegistry]:
    return [CIRegistry(HWBackend.CPU, f"test_{i}.py", s, "unit") for i, s in enumerate(seconds)]


def test_partition_runs_each_file_once_and_balances():
    tests = _tests(9, 1, 4, 4, 2, 7, 3)
    shares = [auto_partition(tests, rank, 3) for rank in range(3)]
    assert sorted(t.filename for share in shares for t in share) == [t.filename for t in tests]
    totals = [sum(t.est_time for t in share) for share in shares]
    assert max(totals) - min(totals) <= 2
    assert shares == [auto_partition(tests[::-1], rank, 3) for rank in range(3)]


def test_partition_uses_measured_times():
    tests = _tests(1, 1, 1)
    shares = [auto_partition(tests, rank, 2, {"test_2.py": 100.0}) for rank in range(2)]
    assert [t.filename for t in shares[0]] == ["test_2.py"]


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_partition_refuses_impossible_ranks(rank, size):
    with pytest.raises(ValueError, match="rank"):
        auto_partition([], rank, size)


def _run(case: type[unittest.TestCase]) -> unittest.TestResult:
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    return result


def test_failed_set_up_class_still_tears_down():
    events = []

    class Case(CustomTestCase):
        @classmethod
        def setUpClass(cls):
            events.append("up")
            raise OSError("port taken")

        @classmethod
        def tearDownClass(cls):
            events.append("down")

        def test_nothing(self):
            events.append("test")

    class Derived(Case):
        @classmethod
        def setUpClass(cls):
            super().setUpClass()

    assert not _run(Case).wasSuccessful()
    assert events == ["up", "down"]
    assert not _run(Derived).wasSuccessful()
    assert events == ["up", "down"] * 2


def test_retry_runs_a_failing_test_again_and_a_skip_once():
    runs = []

    class Case(CustomTestCase):
        def setUp(self):
            runs.append("setup")

        def test_flaky(self):
            runs.append("flaky")
            assert runs.count("flaky") == 2

        def test_skip(self):
            runs.append("skip")
            self.skipTest("no hardware")

        def test_broken(self):
            runs.append("broken")
            raise AssertionError("always")

    with envs.SGLANG_TEST_MAX_RETRY.override(1):
        result = _run(Case)
    assert runs.count("flaky") == 2 and runs.count("skip") == 1 and runs.count("broken") == 2
    assert len(result.skipped) == 1
    assert [case.id().rpartition(".")[2] for case, _ in result.errors] == ["test_broken"]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
