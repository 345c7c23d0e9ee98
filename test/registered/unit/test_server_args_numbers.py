"""Every numeric flag of the server, with the values that people mistype.

Each is read, resolved and planned with on both devices. It is refused by a message that names it, or listed
here as one that works; so a new flag without a range shows up.
"""

from __future__ import annotations

import logging
import math

import pytest

from sglang.srt.arg_groups import basic_hook
from sglang.srt.arg_groups.pipeline import run_resolution_pipeline
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.planner import make_plan
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="unit")

NUMERIC = [flag for flag in ServerArgs.flags() if flag.type in (int, float)]
VALUES = (
    *("-1", "-2", "-99999999999", "0", "1e-300", "1.5", "1000000000000", "99999999999999999999999"),
    *("1e300", "nan", "inf", "-inf", "x", ""),
)
LIMITS_THAT_NOTHING_REACHES = {
    *("decode_log_interval", "stream_interval", "watchdog_timeout", "drain_timeout"),
    *("max_queued_requests", "chunked_prefill_size", "max_prefill_tokens", "max_total_tokens"),
    "schedule_conservativeness",
}
ZERO_WORKS = {
    *("random_seed", "port", "drain_timeout", "hicache_size", "base_gpu_id"),
    "speculative_accept_threshold_single",
}
TINY_WORKS = {
    *("drain_timeout", "schedule_conservativeness"),
    *("speculative_accept_threshold_single", "speculative_accept_threshold_acc"),
}
ONE_AND_A_HALF_WORKS = {
    *("max_request_body_mb", "drain_timeout", "schedule_conservativeness"),
    *("device_memory_gb", "hicache_ratio", "hicache_size", "mamba_full_memory_ratio"),
}
WEIGHED_AGAINST_THE_HOST = {"hicache_ratio", "hicache_size"}
"""The host tier compares them with the memory at hand when it is built; see test_hicache.py."""


def is_a(kind: type, text: str) -> bool:
    """Whether a word of the command line is of the flag's type at all."""
    try:
        kind(text)
    except ValueError:
        return False
    return True


def works(name: str, text: str) -> bool:
    """Whether this value is meant to start a server."""
    value = float(text)
    if name in WEIGHED_AGAINST_THE_HOST and 0 < value < math.inf:
        return True
    if (name, value) in (("chunked_prefill_size", -1), ("random_seed", 1e12)):
        return True
    kinds = {0.0: ZERO_WORKS, 1e-300: TINY_WORKS, 1.5: ONE_AND_A_HALF_WORKS}
    return name in kinds.get(value, LIMITS_THAT_NOTHING_REACHES) and 0 <= value < math.inf


def beside(name: str, device: str) -> list[str]:
    """What a flag needs to be read at all."""
    words = ["--model-path", "demo", "--device", device]
    if device == "cuda" and name != "device_memory_gb":
        words += ["--device-memory-gb", "16"]
    if name.startswith("hicache"):
        words += ["--enable-hierarchical-cache"]
    if name.startswith("speculative"):
        algorithm = next((a for a in ("ngram", "dflash", "dspark") if a in name), "nextn")
        words += ["--speculative-algorithm", algorithm.upper()]
        if algorithm in ("dflash", "dspark"):
            words += ["--speculative-draft-model-path", f"demo-{algorithm}"]
    return words


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("flag", NUMERIC, ids=lambda flag: flag.name)
def test_every_number_works_or_is_refused_by_name(flag, device, monkeypatch, capsys):
    monkeypatch.setattr(basic_hook, "has_nvidia_driver", lambda: device == "cuda")
    monkeypatch.setattr(basic_hook.logger, "level", logging.ERROR)
    model = ModelConfig.from_path("demo")
    wrong = []
    for value in VALUES:
        capsys.readouterr()
        try:
            argv = [*beside(flag.name, device), f"{flag.spelling}={value}"]
            make_plan(model, run_resolution_pipeline(prepare_server_args(argv)))
            refusal = None
        except ValueError as error:
            refusal = str(error)
        except SystemExit:
            refusal = capsys.readouterr().err.splitlines()[-1]
        wanted = is_a(flag.type, value) and works(flag.name, value)
        if (refusal is None) != wanted or (refusal is not None and flag.spelling not in refusal):
            wrong.append(f"{flag.spelling}={value}: {refusal or 'is taken'}")
    assert not wrong, "\n".join(wrong)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
