"""Numbers of the benchmarks' command lines: each has a range, and what lies outside is refused by name."""

from __future__ import annotations

import pytest

from sglang.bench_serving import build_parser, main, read_options
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit")

COUNT_FLAGS = (
    *("num-prompts", "max-concurrency", "random-input-len", "random-output-len"),
    *("sharegpt-output-len", "sharegpt-context-len", "gsp-num-groups", "gsp-prompts-per-group"),
    *("gsp-system-prompt-len", "gsp-question-len", "gsp-output-len"),
)
BAD_NUMBERS = (
    *((name, value) for name in COUNT_FLAGS for value in ("0", "-1", "1000000000000")),
    *(("warmup-requests", value) for value in ("-1", "1000000000000")),
    *(("port", value) for value in ("0", "-1", "65536", "999999")),
    *(("ready-check-timeout-sec", value) for value in ("-1", "nan", "inf", "1e300")),
    *(("request-rate", value) for value in ("0", "-1", "nan", "-inf", "1e-300")),
    *(("random-range-ratio", value) for value in ("-0.1", "1.5", "nan", "inf")),
    *(
        ("base-url", url)
        for url in ("http://x:999999", "http://x:0", "http://x:y", "http://:80", "x")
    ),
)


@pytest.mark.parametrize(("name", "value"), BAD_NUMBERS)
def test_numbers_that_cannot_work(name, value, capsys):
    """Catches a value that is taken and then fails, or measures, something else."""
    assert main(["--dataset-name", "random-ids", f"--{name}={value}"]) == 2
    shown = capsys.readouterr().err
    said = f"--{name} {value}: " if name in (*COUNT_FLAGS, "port") else f"--{name} "
    assert said in shown
    assert ("port" if name == "base-url" else "must be at least") in shown or value == "x"


def test_every_number_of_the_command_line_has_a_range():
    """Catches a new numeric option that nobody checks."""
    numeric = {a.dest for a in build_parser()._actions if a.type in (int, float)}
    assert numeric - {name.replace("-", "_") for name, _ in BAD_NUMBERS} == {"seed"}


@pytest.mark.parametrize(
    "words",
    ["--request-rate inf", "--random-range-ratio 1", "--ready-check-timeout-sec 0", "--port 65535"],
)
def test_the_ends_of_ranges_are_taken(words):
    assert read_options(["--dataset-name", "random-ids", *words.split()])


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
