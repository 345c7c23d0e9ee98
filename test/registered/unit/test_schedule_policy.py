"""Admission at the published sizes: what a request counts for while its prompt is being computed.

Mistakes caught: a request in the middle of its prompt that is counted both by the pages it holds and by
its whole length (24 of 25 requests run, and the last runs alone), one that is not counted at all
(the first decode steps retract), and output reserved for requests that have none left.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.request_factory import RequestFactory
from sglang.srt.managers.request_limit import RequestLimit
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import (
    CLIP_NEW_TOKENS,
    NEW_TOKEN_RATIO,
    PLANS_BETWEEN_MATCHES,
    PrefillPolicy,
)
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.memory_rig import MemoryRig, RigConfig

register_cpu_ci(est_time=8, suite="unit")

PAGE, CHUNK, WIDTH, VOCAB = 64, 8192, 4, 248_320


@dataclass
class Played:
    """The scheduler's lists, moved forward without a model."""

    policy: PrefillPolicy
    rig: MemoryRig
    waiting: list[Req] = field(default_factory=list)
    prefilling: list[Req] = field(default_factory=list)
    running: list[Req] = field(default_factory=list)

    def prefill_step(self) -> int:
        """Plan one prefill step and commit it. Returns its tokens; 0 if nothing fits."""
        chunks, admitted = self.policy.plan(self.waiting, self.prefilling, self.running)
        for req in admitted:
            self.waiting.remove(req)
            self.prefilling.append(req)
        for chunk in chunks:
            req = chunk.req
            req.kv.committed_len = chunk.end
            if chunk.track_slot >= 0:
                self.rig.memory.note_track(req, chunk.start + chunk.track_rows)
            if chunk.is_last:
                self.prefilling.remove(req)
                self.running.append(req)
                req.append([1])
            self.rig.memory.cache_unfinished(req, chunk.token_ids[: chunk.end])
        return sum(c.end - c.start for c in chunks)

    def prefill_all(self) -> None:
        while self.prefill_step():
            pass

    def decode_step(self, num_tokens: int) -> bool:
        """One verify step of all that run. False if the pages for it are not there."""
        memory = self.rig.memory
        reqs = self.running
        if not memory.ensure_many(reqs, [r.kv.committed_len + WIDTH for r in reqs]):
            return False
        for req in list(reqs):
            req.kv.committed_len += num_tokens
            req.append([1] * num_tokens)
            if req.finish_reason is not None:
                reqs.remove(req)
                memory.finish(req, req.token_ids()[: min(req.kv.committed_len, req.num_tokens)])
        return True


def played(
    num_tokens: int, *, requests: int, prompt: int, output: int, chunk: int = CHUNK
) -> Played:
    rig = MemoryRig(
        RigConfig(
            num_tokens=num_tokens,
            num_states=150,
            num_rows=25,
            page_size=PAGE,
            state_chunk=64,
            track_interval=256,
            overlap=True,
            max_step_tokens=WIDTH,
            max_context_len=prompt + output + PAGE,
        )
    )
    policy = PrefillPolicy(
        rig.memory,
        schedule_policy="fcfs",
        chunk_tokens=chunk,
        max_prefill_tokens=16_384,
        max_running_requests=25,
        conservativeness=1.0,
        draft_token_num=WIDTH,
    )
    factory = RequestFactory(
        vocab_size=VOCAB,
        limit=RequestLimit(prompt + output, prompt + output, prompt + output),
        decode=None,
        random_seed=0,
        use_priority=False,
        grammars=None,
    )
    rng = random.Random(7)
    state = Played(policy, rig)
    params = SamplingParams(temperature=0.0, max_new_tokens=output, ignore_eos=True)
    params.normalize()
    for i in range(requests):
        ids = rng.choices(range(VOCAB), k=prompt)
        message = TokenizedGenerateReqInput(rid=f"r{i}", input_ids=ids, sampling_params=params)
        state.waiting.append(factory.build(message))
    return state


@pytest.mark.parametrize(
    ("num_tokens", "admitted"),
    [
        pytest.param(788_224, 25, id="lossless-as-published"),
        pytest.param(498_880, 18, id="default-as-published"),
    ],
)
def test_published_workload(num_tokens, admitted):
    """All 25 requests of 26k + 2k run with the tokens that the flag gives, and to their end."""
    state = played(num_tokens, requests=25, prompt=26_000, output=2_000)
    state.prefill_all()
    assert len(state.running) == admitted and not state.prefilling
    if admitted == 25:
        while state.running:
            assert state.decode_step(WIDTH), "a request would have to be retracted"
    state.rig.memory.check_integrity()


def exact_need(prompt: int, output: int) -> int:
    """KV slots for which a second request is admitted beside a first one of the same lengths."""
    tail = int(min(output, CLIP_NEW_TOKENS) * NEW_TOKEN_RATIO) + WIDTH
    return 2 * (prompt + tail)


@pytest.mark.parametrize("chunks_done", [1, 2, 3])
def test_a_request_being_chunked_counts_once(chunks_done):
    """The second fits exactly, however much of the first one's prompt is computed already."""
    prompt, output, chunk = 1024, 200, 256
    need = -(-exact_need(prompt, output) // PAGE) * PAGE
    for spare, fits in ((0, True), (-PAGE, False)):
        state = played(need + spare, requests=2, prompt=prompt, output=output, chunk=chunk)
        second = state.waiting.pop()
        for _ in range(chunks_done):
            assert state.prefill_step() == chunk
        assert state.prefilling[0].kv.committed_len == chunks_done * chunk
        state.waiting.append(second)
        while state.prefilling and second in state.waiting:
            state.prefill_step()
        state.prefill_step()
        assert (second not in state.waiting) == fits


def test_what_is_not_computed_yet_is_reserved():
    """Control: the free pages alone would let the second in while the first still needs them."""
    prompt, output = 1024, 200
    state = played(
        exact_need(prompt, output) - 512, requests=2, prompt=prompt, output=output, chunk=64
    )
    state.prefill_step()
    memory = state.rig.memory
    assert memory.available_tokens() > prompt + output
    state.prefill_all()
    assert len(state.running) == 1 and len(state.waiting) == 1


def test_a_refused_request_is_matched_now_and_then():
    """Catches a match of the whole prompt in every decode step, and a prefix that is never seen."""
    prompt, output = 1024, 200
    state = played(exact_need(prompt, output) - 512, requests=2, prompt=prompt, output=output)
    first, second = state.waiting
    state.prefill_all()
    assert state.running == [first] and state.waiting == [second]
    matches: list[int] = []
    match = state.rig.memory.match

    def counted(token_ids, limit=None):
        matches.append(len(token_ids))
        return match(token_ids, limit)

    state.rig.memory.match = counted
    for _ in range(4 * PLANS_BETWEEN_MATCHES):
        assert not state.prefill_step()
    assert len(matches) == 4
    while state.running:
        assert state.decode_step(WIDTH)
    assert state.prefill_step() == prompt, "room that has come free is taken at once"


@dataclass
class Counted:
    """A waiting request that counts how often its place is asked for."""

    priority: int
    arrival: float
    asked: int = 0

    def __getattribute__(self, name):
        if name == "arrival":
            self.asked += 1
        return super().__getattribute__(name)


def test_a_long_queue_is_joined_in_few_looks():
    """Catches a queue that is sorted anew for each request, 9 s for 10,000, and one in another order."""
    policy = object.__new__(PrefillPolicy)
    policy._schedule_policy = "fcfs"
    generator, queue, expected = random.Random(1), [], []
    for arrival in range(500):
        # Some arrive at one time: the earlier one stays ahead.
        req = Counted(generator.choice([0, 0, 5, -1]), arrival // 2)
        policy.add(queue, req)
        expected.append(req)
    assert max(req.asked for req in queue) < 500
    policy.order(expected)
    assert all(mine is other for mine, other in zip(queue, expected, strict=True))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
