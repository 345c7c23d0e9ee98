"""F120: the self-check passes on this machine, sees a wrong device and names the way out."""

from __future__ import annotations

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.model_rig import ModelRig
from sglang.test.self_check import Finding, main

register_cpu_ci(est_time=25, suite="unit")


def test_this_machine_computes_what_it_should():
    lines: list[str] = []
    assert main(["--device", "cpu"], write=lines.append) == 0, lines
    assert len(lines) == 6 * 3 + 1 and lines[-1] == "this CPU computes what it should"
    assert all(line.startswith("ok ") for line in lines[:-1])


def one_step_short(self, accepted_steps, **options):
    commit(self, [step - 1 for step in accepted_steps], **options)


def of_lossless_alone(self, accepted_steps, **options):
    commit(self, accepted_steps, **options)
    cache = self.req_pool.mamba_pool.mamba_cache
    if cache.intermediate_ssm_u is not None:
        cache.temporal[0, 1, 0, 0, 0] += 1e-6


commit = ModelRig.commit


@pytest.mark.parametrize(
    ("fault", "words"),
    [(one_step_short, "decode and verify"), (of_lossless_alone, "lossless equals default")],
)
def test_a_wrong_device_is_found_and_told_the_way_out(fault, words, monkeypatch):
    """A commit that is off by one row; one bit in a state that only the lossless mode has."""
    monkeypatch.setattr(ModelRig, "commit", fault)
    monkeypatch.setattr("sglang.test.self_check.ARCHITECTURES", ("qwen3_5",))
    lines: list[str] = []
    assert main(["--device", "cpu"], write=lines.append) == 1
    wrong = [line for line in lines if line.startswith("WRONG ")]
    assert wrong and all(words in line for line in wrong)
    assert lines[-1].endswith(
        "serve with SGLANG_CPU_KERNELS=torch, which uses none of the compiled kernels"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_missing_gpu_is_named(capsys):
    """Catches PyTorch's own traceback in place of a sentence."""
    with pytest.raises(SystemExit) as stop:
        main(["--device", "cuda"])
    assert stop.value.code == 2
    assert "--device cuda: no GPU is visible" in capsys.readouterr().err


def test_not_a_number_is_wrong():
    """A comparison with NaN is false either way round."""
    assert not Finding("x", float("nan"), 1.0).is_good
    assert not Finding("x", torch.inf, 1.0).is_good
    assert Finding("x", 1.0, 1.0).is_good


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
