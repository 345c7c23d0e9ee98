"""The adaptive number of steps: table, hysteresis, probes, and bad files."""

from __future__ import annotations

import json

import pytest

from sglang.srt.speculative.adaptive import AdaptiveConfig, StepPolicy
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit")


def feed(policy, batch_size, mean, batches):
    for _ in range(batches):
        policy.observe(batch_size, mean)
    return policy.steps_for(batch_size)


def test_slot_is_the_largest_key_not_above_the_batch():
    policy = StepPolicy(AdaptiveConfig.load(None), 3)
    assert [policy.steps_for(n) for n in (1, 7, 8, 31, 32, 63, 64, 500)] == [3, 3, 3, 3, 1, 1, 0, 0]
    assert policy.max_steps == 7


def test_nothing_changes_during_warmup_and_between_intervals():
    policy = StepPolicy(AdaptiveConfig.load(None), 3)
    assert feed(policy, 1, 3.0, 14) == 3
    assert feed(policy, 1, 3.0, 1) == 5


def test_high_acceptance_climbs_and_low_acceptance_falls():
    policy = StepPolicy(AdaptiveConfig.load(None), 3)
    for _ in range(30):
        feed(policy, 1, float(policy.steps_for(1)), 5)
    assert policy.steps_for(1) == 7
    assert feed(policy, 1, 0.0, 60) == 1


def test_without_drafts_a_probe_follows_and_fails_again():
    """A slot at 0 steps cannot measure; it must not stay there for ever nor keep the probe."""
    config = AdaptiveConfig.from_dict({"1": {"candidate_steps": [0, 2]}})
    policy = StepPolicy(config, 2)
    assert feed(policy, 1, 0.0, 15) == 0
    assert feed(policy, 1, 0.0, 5) == 2
    assert feed(policy, 1, 0.0, 5) == 0


def test_slots_learn_apart():
    policy = StepPolicy(AdaptiveConfig.load(None), 3)
    feed(policy, 1, 0.0, 60)
    assert (policy.steps_for(1), policy.steps_for(8)) == (1, 3)


def test_ceiling_caps_what_does_not_grow():
    raw = {"ceiling_coeff": 1.0, "1": {"candidate_steps": [1, 2, 8], "down_hysteresis": -5}}
    policy = StepPolicy(AdaptiveConfig.from_dict(raw), 8)
    assert feed(policy, 1, 1.9, 15) == 2


def test_start_is_the_given_number_or_the_middle():
    config = AdaptiveConfig.from_dict({"candidate_steps": [1, 2, 4, 6]})
    assert StepPolicy(config, 6).steps_for(1) == 6
    assert StepPolicy(config, None).steps_for(1) == 4
    with pytest.raises(ValueError, match="--speculative-num-steps 5"):
        StepPolicy(config, 5)


def test_shared_keys_are_defaults_that_a_slot_overrides(tmp_path):
    file = tmp_path / "a.json"
    raw = {"candidate_steps": [1, 3], "ema_alpha": 0.5, "4": {}, "16": {"candidate_steps": [0]}}
    file.write_text(json.dumps(raw))
    config = AdaptiveConfig.load(str(file))
    assert [(size, slot.candidate_steps, slot.ema_alpha) for size, slot in config.slots] == [
        (4, (1, 3), 0.5),
        (16, (0,), 0.5),
    ]
    assert StepPolicy(config, 1).steps_for(1) == 1, "below the first key the first slot serves"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"1": {"steps": [1]}}, "unknown key 1.steps"),
        ({"1": {"candidate_steps": [-1]}}, "candidate_steps"),
        ({"1": {}}, "no candidate_steps"),
        ({"candidate_steps": [1], "ema_alpha": 0}, "ema_alpha=0"),
    ],
)
def test_bad_files_are_refused_by_key(tmp_path, raw, message):
    file = tmp_path / "a.json"
    file.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=message):
        AdaptiveConfig.load(str(file))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
