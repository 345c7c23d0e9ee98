"""Usage of /v1/responses: reasoning tokens are counted, not assumed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang.srt.entrypoints.openai.serving_responses import _Writer
from sglang.srt.managers.io_struct import FinishReason
from sglang.srt.parser.events import Content, Reasoning
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit")


@pytest.mark.parametrize(
    ("events", "delivered", "counted"),
    [
        ([Content("a b c")], 3, 0),
        ([Reasoning("a b"), Content("c")], 4, 2),
        ([Reasoning("a b c d e f")], 5, 5),
    ],
    ids=["none", "some", "cut inside"],
)
def test_reasoning_tokens_are_those_of_the_reasoning(events, delivered, counted):
    """Catches a figure that is always zero, or larger than what was delivered."""
    writer = _Writer({}, lambda text: len(text.split()))
    for event in events:
        writer.add(event)
    state = SimpleNamespace(
        prompt_tokens=7,
        cached_tokens=0,
        completion_tokens=delivered,
        finish_reason=FinishReason(type="length"),
    )
    usage = writer.response(state)["usage"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": counted}
    assert usage["total_tokens"] == 7 + delivered


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
