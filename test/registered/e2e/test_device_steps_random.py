"""Random traffic over steps led by the device, one ahead: every answer is that of the host's path.

Requests of every kind arrive, end and are aborted between steps, in pools that are too small for them.
What is left in the prefix cache is compared too: each state and each page with a cold run of its tokens.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from sglang.srt.managers.io_struct import AbortReq, FlushCacheReqInput, TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.engine_harness import InProcessEngine

register_cpu_ci(est_time=40, suite="e2e")

MTP = {"speculative_algorithm": "NEXTN"}
DSPARK = {"speculative_algorithm": "DSPARK", "speculative_draft_model_path": "demo-dspark"}
LOSSLESS = {"enable_linear_lossless_verify": True}
LAZY = {"mamba_radix_cache_strategy": "extra_buffer_lazy"}
CONFIGS = {
    "roomy": {"page_size": 1} | MTP | LOSSLESS,
    "roomy-lazy-dspark": {"page_size": 64} | DSPARK | LAZY,
    "few-pages": {"page_size": 1, "max_total_tokens": 240} | MTP,
    "few-pages-16": {"page_size": 16, "max_total_tokens": 240} | MTP | LOSSLESS,
    "few-pages-64-dspark": {"page_size": 64, "max_total_tokens": 256} | DSPARK | LOSSLESS,
    "few-pages-plain": {"page_size": 1, "max_total_tokens": 240, "chunked_prefill_size": 96},
    "few-states": {"page_size": 16, "max_mamba_cache_size": 12, "max_total_tokens": 400}
    | {"enable_hierarchical_cache": True, "hicache_ratio": 2.0}
    | MTP,
    "few-states-lazy-plain": {"page_size": 16, "max_mamba_cache_size": 8} | LAZY,
    "few-of-both-lazy": {"page_size": 1, "max_mamba_cache_size": 8, "max_total_tokens": 300}
    | {"chunked_prefill_size": 64}
    | MTP
    | LOSSLESS
    | LAZY,
}
GRID = 64


@dataclass
class Ask:
    """One request: what is asked, and under which id it ran."""

    prompt: list[int]
    sampling: dict
    extra: dict = field(default_factory=dict)
    want: list[int] = field(default_factory=list)
    rid: str = ""
    aborted: bool = False

    def submit(self, engine: InProcessEngine, rid: str) -> None:
        params = SamplingParams(**({"temperature": 0.0} | self.sampling))
        params.normalize()
        params.verify(engine.built.runner.model_config.vocab_size)
        engine.scheduler.handle(
            TokenizedGenerateReqInput(
                rid=rid, input_ids=list(self.prompt), sampling_params=params, **self.extra
            )
        )


class Oracle:
    """The host's path, without speculation and without a prefix cache."""

    def __init__(self) -> None:
        self._engine = InProcessEngine("demo", device_steps=False, disable_radix_cache=True)
        self._count = 0
        self._found: dict[tuple[int, ...], dict[str, Tensor]] = {}

    def answers(self, asks: list[Ask]) -> list[tuple[list[int], list[float]]]:
        """Output ids, and the log probabilities that were asked for."""
        rids = []
        for ask in asks:
            rids.append(f"cold{self._count}")
            self._count += 1
            ask.submit(self._engine, rids[-1])
        self._engine.run()
        return [(self._engine.ids(rid), logprobs(self._engine, rid)) for rid in rids]

    def memory(self, tokens: list[int]) -> dict[str, Tensor]:
        """State after ``tokens`` and KV of their rows, computed at once."""
        key = tuple(tokens)
        if key not in self._found:
            Ask(tokens, {"max_new_tokens": 2}).submit(self._engine, "probe")
            self._engine.scheduler.step()
            (req,) = self._engine.scheduler.running
            assert req.kv.committed_len == len(tokens)
            pools = self._engine.built.pools
            slots = pools.req_pool.req_to_token[req.req_pool_idx, : len(tokens)].long()
            self._found[key] = state_at(self._engine, req.kv.mamba_pool_idx) | kv_at(
                self._engine, slots
            )
            self._engine.abort("probe")
            self._engine.run()
        return self._found[key]


def logprobs(engine: InProcessEngine, rid: str) -> list[float]:
    return [x.logprob for item in engine.outputs[rid] for x in item.output_logprobs or ()]


def state_at(engine: InProcessEngine, slot: int) -> dict[str, Tensor]:
    return {name: tensor[:, slot].clone() for name, tensor in engine.state_tensors().items()}


def kv_at(engine: InProcessEngine, slots: Tensor) -> dict[str, Tensor]:
    pool = engine.built.pools.kv_pool
    return {
        f"{name}{i}": buffer[slots].clone()
        for name, buffers in (("k", pool.k_buffer), ("v", pool.v_buffer))
        for i, buffer in enumerate(buffers)
    }


def distance(found: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Largest difference of any tensor, relative to that tensor's largest value."""
    return max(
        float((found[name] - want[name]).abs().max() / want[name].abs().max()) for name in found
    )


class Traffic:
    """Makes requests, drives one engine, and compares."""

    def __init__(self, engine: InProcessEngine, oracle: Oracle, seed: str) -> None:
        self.rng = random.Random(seed)
        self.engine = engine
        self.oracle = oracle
        self.stems = [self.words(30, 100) for _ in range(3)]
        self.steps_ahead = 0
        self.specials = self.rng.randrange(6)
        # A rule that draws its drafts has answers of its own.
        self.draws = engine.built.worker._accept_rule.wants_probs
        self.digested: list[tuple[list[int], dict[str, Tensor]]] = []
        self._watch()

    def _watch(self) -> None:
        """Count steps ahead, keep the states that digests are made of, and look who is retracted."""
        worker, memory = self.engine.built.worker, self.engine.built.memory
        decode, digest, retract = worker.decode, worker.state_digest, memory.retract

        def watched_decode(plan):
            self.steps_ahead += any(r.num_in_flight for r in plan.reqs)
            return decode(plan)

        def watched_digest(req):
            tokens = req.token_ids()[: req.kv.committed_len]
            if len(tokens) == req.kv.committed_len:
                self.digested.append((tokens, state_at(self.engine, req.kv.mamba_pool_idx)))
            return digest(req)

        def watched_retract(req, token_ids):
            assert req.num_in_flight == 0, "a step in flight moves a request without memory"
            retract(req, token_ids)

        worker.decode, worker.state_digest = watched_decode, watched_digest
        memory.retract = watched_retract

    def words(self, least: int, most: int) -> list[int]:
        return [self.rng.randrange(20, 3000) for _ in range(self.rng.randint(least, most))]

    def asks(self, count: int) -> tuple[list[Ask], list[Ask]]:
        """As many greedy requests as mixed ones."""
        asks = [
            Ask(
                self.rng.choice([*self.stems, []]) + self.words(1, 40),
                {"max_new_tokens": self.rng.randint(1, 60)},
            )
            for _ in range(2 * count)
        ]
        self._learn(asks)
        for i, ask in enumerate(asks):
            if self.rng.random() < 0.4:
                stop = self.rng.choice(ask.want)
                ask.sampling["stop_token_ids"] = [stop]
                ask.want = ask.want[: ask.want.index(stop) + 1]
            if i >= count and self.rng.random() < 0.6:
                self._make_special(ask)
        return asks[:count], asks[count:]

    def _learn(self, asks: list[Ask]) -> None:
        for ask, (ids, _) in zip(asks, self.oracle.answers(asks), strict=True):
            ask.want = ids

    def _make_special(self, ask: Ask) -> None:
        rng = self.rng
        kind = self.specials % 6
        self.specials += 1
        ask.want = []
        if kind == 0 and not self.draws:
            ask.sampling |= {"temperature": 0.9, "sampling_seed": rng.randrange(100), "top_k": 40}
        elif kind == 1:
            ask.sampling |= {"repetition_penalty": 1.3, "frequency_penalty": 0.2}
        elif kind == 2:
            ask.extra |= {"return_logprob": True, "logprob_start_len": rng.choice([-1, 0])}
        elif kind == 3:
            ask.sampling |= {"regex": "[a-z]{3,9}( [a-z]{2,9}){2,9}", "stop_token_ids": []}
        elif kind == 4:
            ask.sampling |= {"min_new_tokens": ask.sampling["max_new_tokens"] // 2}
        else:
            ask.extra |= {"return_state_digest": True}

    def run(self, asks: list[Ask], name: str, *, aborts: bool) -> None:
        """Submit while others run, abort some, flush now and then; end idle with balanced books."""
        scheduler, rng = self.engine.scheduler, self.rng
        for i, ask in enumerate(asks):
            ask.rid = f"{name}.{i}"
            ask.submit(self.engine, ask.rid)
            for _ in range(rng.choice([0, 0, 0, 1, 2, 8])):
                if not scheduler.is_idle:
                    scheduler.step()
                self.engine.built.memory.check_integrity()
            if aborts and rng.random() < 0.2:
                self._abort(rng.choice([a for a in asks if a.rid]))
            if rng.random() < 0.1 and scheduler.is_idle:
                scheduler.handle(FlushCacheReqInput(req_id=name))
                assert self.engine.messages[-1].success
        self.engine.run(20_000)

    def _abort(self, ask: Ask) -> None:
        sent = self.engine.outputs.get(ask.rid)
        if sent is None or sent[-1].finish_reason is None:
            ask.aborted = True
            self.engine.scheduler.handle(AbortReq(rid=ask.rid))

    def check(self, asks: list[Ask]) -> None:
        special = [ask for ask in asks if not ask.want]
        for ask, (ids, values) in zip(special, self.oracle.answers(special), strict=True):
            ask.want = ids
            if not ask.aborted:
                pairs = list(zip(logprobs(self.engine, ask.rid), values, strict=True))
                assert all(math.isclose(a, b, abs_tol=2e-3) for a, b in pairs), ask.rid
        for ask in asks:
            found = self.engine.ids(ask.rid)
            want = ask.want[: len(found)] if ask.aborted else ask.want
            assert found == want, (ask.rid, ask, self.engine.last(ask.rid).cached_tokens)
        for tokens, state in self.digested:
            want = self.oracle.memory(tokens)
            assert distance(state, {name: want[name] for name in state}) < 1e-3, len(tokens)
        self.digested.clear()

    def check_cache(self) -> int:
        """Every state and page of the prefix tree against a cold run; how many states there were."""
        count = 0
        for node in self.engine.built.memory._tree.nodes():
            tokens = node.token_bytes()
            ids = torch.frombuffer(bytearray(tokens), dtype=torch.int32).tolist()
            want = self.oracle.memory(ids)
            slots = torch.from_numpy(node.slots)
            found = kv_at(self.engine, slots)
            rows = {name: want[name][node.start : node.end] for name in found}
            assert distance(found, rows) < 1e-3, (node.start, node.end)
            if node.state_slot >= 0:
                state = state_at(self.engine, node.state_slot)
                assert distance(state, {name: want[name] for name in state}) < 1e-3, node.end
                count += 1
        return count

    def check_boundaries(self, asks: list[Ask]) -> int:
        """With room for all, the last boundary that an answer passed is in the tree."""
        count = 0
        for ask in asks:
            tokens = ask.prompt + self.engine.ids(ask.rid)
            boundary = (len(tokens) - 1) // GRID * GRID
            if not ask.aborted and boundary > len(ask.prompt):
                match = self.engine.built.memory.match(tokens, boundary)
                assert match.cached_len == boundary, (ask.rid, len(ask.prompt), len(tokens))
                count += 1
        return count

    def next_turns(self, asks: list[Ask]) -> list[Ask]:
        following = [
            Ask(
                ask.prompt + self.engine.ids(ask.rid) + self.words(1, 10),
                {"max_new_tokens": self.rng.randint(1, 12)},
            )
            for ask in asks
            if not ask.aborted
        ]
        self._learn(following)
        return following


@pytest.fixture(scope="module")
def oracle():
    return Oracle()


@pytest.mark.parametrize("name", list(CONFIGS))
def test_random_traffic(name, oracle):
    """Planted faults that it finds: pages or boundary slots for one step instead of two, rows of ended
    requests kept, lengths or bonus tokens from the host, a step ahead of penalties, samples or digests,
    retraction with a step in flight, a boundary state of the wrong row or not noted."""
    options = {
        "mamba_track_interval": GRID,
        "max_running_requests": 4,
        "schedule_conservativeness": 0.1,
    }
    engine = InProcessEngine(
        "demo", device_steps=True, disable_overlap_schedule=False, **(options | CONFIGS[name])
    )
    traffic = Traffic(engine, oracle, name)
    states = boundaries = 0
    for turn, asks in enumerate(traffic.asks(7)):
        traffic.run(asks, f"first{turn}", aborts=turn == 0)
        traffic.check(asks)
        states += traffic.check_cache()
        if name.startswith("roomy"):
            boundaries += traffic.check_boundaries(asks)
        following = traffic.next_turns(asks)[:3]
        traffic.run(following, f"second{turn}", aborts=False)
        traffic.check(following)
    assert traffic.steps_ahead > 20 and states > 0
    assert boundaries > 0 or not name.startswith("roomy")
    if name.startswith("few-pages"):
        assert engine.scheduler.metrics.num_retracted > 0


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
