"""Random conversations over the real engine: whatever the cache does, the text is that of a cold run.

Strategies, page sizes, chunk sizes, speculation, tiny pools, retraction, aborts, host and file tiers,
restarts and damaged files, all at once. Catches what no single-purpose test combines.
"""

from __future__ import annotations

import random

import pytest

from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.mem_cache.request_slots import RequestSlots
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.engine_harness import InProcessEngine
from sglang.test.make_checkpoint import make_checkpoint

register_cpu_ci(est_time=60, suite="e2e")

FILES = {"enable_hierarchical_cache": True, "hicache_storage_backend": "file"}
MTP = {"speculative_algorithm": "NEXTN", "enable_linear_lossless_verify": True}
CONFIGS = {
    "pair-files": {"page_size": 64, "max_mamba_cache_size": 8, "hicache_ratio": 4.0} | FILES | MTP,
    "lazy-chunks": {
        "mamba_radix_cache_strategy": "extra_buffer_lazy",
        "page_size": 16,
        "chunked_prefill_size": 100,
        "enable_hierarchical_cache": True,
        "hicache_write_policy": "write_back",
        "hicache_ratio": 1.0,
    },
    "single-entry-mtp": {
        "page_size": 32,
        "disable_overlap_schedule": True,
        "chunked_prefill_size": 64,
        "max_mamba_cache_size": 6,
    }
    | MTP,
    "no-buffer-files": {
        "mamba_radix_cache_strategy": "no_buffer",
        "page_size": 1,
        "disable_overlap_schedule": True,
        "hicache_write_policy": "write_back",
    }
    | FILES,
    "tree": {"page_size": 16, "speculative_algorithm": "NGRAM", "max_total_tokens": 384},
}
LENGTHS = (1, 3, 20, 70)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    out = tmp_path_factory.mktemp("ckpt") / "tiny"
    make_checkpoint(str(out), arch="qwen3_5", dtype="fp32", seed=11)
    return str(out)


class Conversations:
    """Turns of a few conversations that branch and grow, with the output of a cold run for each."""

    def __init__(self, checkpoint: str, rng: random.Random) -> None:
        self.rng = rng
        self.texts = [self.words(20, 150) for _ in range(3)]
        self.cold = InProcessEngine(checkpoint, disable_radix_cache=True)
        self.outputs: dict[tuple[int, ...], list[int]] = {}

    def words(self, least: int, most: int) -> list[int]:
        return [self.rng.randrange(200) for _ in range(self.rng.randint(least, most))]

    def next_turn(self) -> tuple[int, list[int], list[int]]:
        """Conversation, prompt, and the output that is right."""
        which = self.rng.randrange(len(self.texts))
        prompt = self.texts[which] + self.words(0, 20)
        key = tuple(prompt)
        if key not in self.outputs:
            (self.outputs[key],) = self.cold.generate([prompt], max_new_tokens=70, ignore_eos=True)
        return which, prompt, self.outputs[key][: self.rng.choice(LENGTHS)]


def damage(folder, rng):
    for path in sorted(folder.rglob("*.row")):
        if rng.random() < 0.1:
            content = path.read_bytes()
            cut = content[: rng.randrange(len(content))]
            path.write_bytes(rng.choice([cut, content[:-1] + bytes([content[-1] ^ 1])]))


def run_round(engine, talk):
    """Submit turns while others run; abort some; compare all that ended. Returns (compared, cached)."""
    live = {}
    for _ in range(8):
        which, prompt, want = talk.next_turn()
        rid = engine.submit(prompt, max_new_tokens=len(want), ignore_eos=True)
        live[rid] = (which, prompt, want)
        for _ in range(talk.rng.randint(0, 4)):
            if not engine.scheduler.is_idle:
                engine.scheduler.step()
            engine.built.memory.check_integrity()
        if talk.rng.random() < 0.1:
            victim = talk.rng.choice(list(live))
            engine.scheduler.handle(AbortReq(rid=victim))
            del live[victim]
    engine.run(20_000)
    cached = 0
    for rid, (which, prompt, want) in live.items():
        assert engine.ids(rid) == want, (rid, len(prompt), engine.last(rid).cached_tokens)
        cached += engine.last(rid).cached_tokens
        talk.texts[which] = (prompt + want)[:200]
    return len(live), cached


def converse(checkpoint, folder, name):
    options = {
        "mamba_radix_cache_strategy": "extra_buffer",
        "mamba_track_interval": 64,
        "max_running_requests": 4,
        "max_total_tokens": 512,
        "schedule_conservativeness": 0.1,
    } | CONFIGS[name]
    has_files = "hicache_storage_backend" in options
    if has_files:
        options["hicache_storage_dir"] = str(folder)
    talk = Conversations(checkpoint, random.Random(name))
    engine = InProcessEngine(checkpoint, **options)
    compared = cached = 0
    for _ in range(4):
        counts = run_round(engine, talk)
        compared, cached = compared + counts[0], cached + counts[1]
        if has_files:
            engine.built.close()
            damage(folder, talk.rng)
            engine = InProcessEngine(checkpoint, **options)
    assert compared >= 20 and cached > 0
    memory = engine.built.memory
    assert memory.flush()
    stats = memory.stats()
    assert stats["kv_tokens_available"] == stats["kv_tokens_total"]
    assert stats["states_used"] == stats["states_cached"] == 0
    engine.built.close()


@pytest.mark.parametrize("name", CONFIGS)
def test_text_never_depends_on_the_cache(checkpoint, tmp_path, name):
    converse(checkpoint, tmp_path, name)


def test_a_state_that_is_not_copied_is_caught(checkpoint, tmp_path, monkeypatch):
    """Control: a hit that continues from whatever the working slot held."""
    monkeypatch.setattr(RequestSlots, "copy_state", lambda self, src, dst: None)
    with pytest.raises(AssertionError):
        converse(checkpoint, tmp_path, "lazy-chunks")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
