"""The same question gets the same answer: after a flush, after other traffic, in chunks of any size.

Known faults F31, F114, F122, F123.
"""

from __future__ import annotations

import logging
import random

import pytest
import torch

from sglang.srt.managers.io_struct import FlushCacheReqInput
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.engine_harness import InProcessEngine
from sglang.test.make_checkpoint import make_checkpoint

register_cpu_ci(est_time=20, suite="e2e")

SPEC = {"speculative_algorithm": "NEXTN", "enable_linear_lossless_verify": True}
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "sampling_seed": 4}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    out = tmp_path_factory.mktemp("ckpt") / "tiny"
    make_checkpoint(str(out), arch="qwen3_5", dtype="fp32", seed=13)
    return str(out)


def prompts(count, seed, low=3, high=150):
    rng = random.Random(seed)
    return [[rng.randrange(200) for _ in range(rng.randint(low, high))] for _ in range(count)]


@pytest.mark.parametrize("mode", [{}, SPEC], ids=["plain", "mtp-lossless"])
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_the_same_batch_gives_the_same_tokens(checkpoint, mode, sampling):
    """Catches state that outlives a flush, or a cached prefix that changes an answer (F122, F123)."""
    engine = InProcessEngine(checkpoint, chunked_prefill_size=70, **mode)
    asked = {"max_new_tokens": 24, "ignore_eos": True, **sampling}
    first = engine.generate(prompts(5, seed=1), **asked)
    engine.scheduler.handle(FlushCacheReqInput(req_id="f"))
    assert engine.messages[-1].success
    assert engine.generate(prompts(5, seed=1), **asked) == first
    engine.generate([*prompts(4, seed=2), *(p[:40] + [7] for p in prompts(5, seed=1))], **asked)
    assert engine.generate(prompts(5, seed=1), **asked) == first
    other = asked | {"logit_bias": {first[0][3]: -100.0}}
    assert engine.generate(prompts(5, seed=1), **other) != first


@pytest.mark.parametrize("chunk", [1, 63])
def test_chunks_below_the_state_chunk_change_nothing(checkpoint, chunk):
    """Catches a state or window that is lost between chunks smaller than 64 (F31)."""
    asked = {"max_new_tokens": 16, "ignore_eos": True}
    text = prompts(2, seed=5, low=70, high=90)
    whole = InProcessEngine(checkpoint, chunked_prefill_size=-1, **SPEC).generate(text, **asked)
    cut = InProcessEngine(checkpoint, chunked_prefill_size=chunk, **SPEC)
    assert cut.generate(text, **asked) == whole


def test_another_state_dtype_is_used_shown_and_warned_about(checkpoint, caplog):
    """Catches a flag that is ignored, and an override that nobody is told of (F114)."""
    with caplog.at_level(logging.WARNING):
        plain = InProcessEngine(checkpoint)
    assert plain.state_tensors()["temporal"].dtype == torch.float32
    assert plain.built.info["mamba_ssm_dtype"] == "float32" and not caplog.records
    with caplog.at_level(logging.WARNING):
        narrow = InProcessEngine(checkpoint, mamba_ssm_dtype="bfloat16")
    assert narrow.state_tensors()["temporal"].dtype == torch.bfloat16
    assert narrow.built.info["mamba_ssm_dtype"] == "bfloat16"
    (record,) = caplog.records
    assert "bfloat16 although the model's config names float32" in record.getMessage()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
