"""Workloads for comparing engines bit by bit, and memory poisoned around them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch import Tensor

from sglang.srt.managers.io_struct import FlushCacheReqInput, FlushCacheReqOutput
from sglang.srt.mem_cache.pool import MHATokenToKVPool
from sglang.test.engine_harness import InProcessEngine

NUM_BATCHED = 5
TEXT = [(i * 37 + 11) % 3000 + 20 for i in range(1200)]


@dataclass
class Outcome:
    """What a workload left: everything but ``pools`` is comparable between engines of one model.

    cached  cached tokens of every request
    tree    by a node's tokens, digests of its KV and of its state ("" without one)
    pools   by tensor, a digest of all state slots but slot 0, free ones included
    """

    prompts: dict[str, list[int]] = field(default_factory=dict)
    ids: dict[str, list[int]] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    tree: dict[bytes, tuple[str, str]] = field(default_factory=dict)
    pools: dict[str, str] = field(default_factory=dict)

    def first_difference(self, other: Outcome, *, pools: bool) -> str | None:
        """Name of what differs, or None."""
        for rid, ids in self.ids.items():
            if ids != other.ids[rid]:
                pairs = enumerate(zip(ids, other.ids[rid], strict=True))
                return f"ids of {rid} from token {next(i for i, (a, b) in pairs if a != b)}"
        if self.cached != other.cached:
            return f"cached tokens {self.cached} and {other.cached}"
        if self.tree.keys() != other.tree.keys():
            return "keys of the prefix tree"
        for key, (kv, state) in self.tree.items():
            other_kv, other_state = other.tree[key]
            if kv != other_kv:
                return f"KV of a cached prefix of {len(key) // 4} tokens"
            if state != other_state:
                return f"state of a cached prefix of {len(key) // 4} tokens"
        wrong = [name for name, digest in self.pools.items() if digest != other.pools[name]]
        return f"state slots: {wrong}" if pools and wrong else None

    @property
    def num_values(self) -> int:
        """Things that ``first_difference`` compares."""
        states = sum(state != "" for _, state in self.tree.values())
        return 2 * len(self.ids) + len(self.tree) + states


def digest(*tensors: Tensor) -> str:
    """Of all bytes; waits for the device."""
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        found.update(tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def kv_pools(engine: InProcessEngine) -> list[MHATokenToKVPool]:
    pools = engine.built.pools
    return [pools.kv_pool, *([pools.draft_kv_pool] if pools.draft_kv_pool else [])]


def snapshot(engine: InProcessEngine, outcome: Outcome) -> Outcome:
    """Fill in what the idle engine holds now."""
    states = engine.state_tensors()
    target = engine.built.pools.kv_pool
    for node in engine.built.memory._tree.nodes():
        if not node.num_tokens:
            continue
        slots = torch.from_numpy(node.slots).to(target.k_buffer[0].device)
        kv = digest(*(buffer[slots] for buffer in (*target.k_buffer, *target.v_buffer)))
        slot, state = node.state_slot, ""
        if slot >= 0:
            state = digest(*(tensor[:, slot] for tensor in states.values()))
        outcome.tree[node.token_bytes()] = (kv, state)
    outcome.pools = {name: digest(tensor[:, 1:]) for name, tensor in states.items()}
    return outcome


def _run(engine: InProcessEngine, outcome: Outcome, requests: Sequence[tuple[list[int], dict]]):
    start = len(outcome.ids)
    rids = []
    for i, (prompt, options) in enumerate(requests):
        rid = engine.submit(prompt, ignore_eos=True, **options)
        rids.append((f"request {start + i}", rid, prompt))
    engine.run()
    for name, rid, prompt in rids:
        outcome.prompts[name] = prompt
        outcome.ids[name] = engine.ids(rid)
        outcome.cached[name] = engine.last(rid).cached_tokens


def single(engine: InProcessEngine) -> Outcome:
    """One request across a track boundary."""
    outcome = Outcome()
    _run(engine, outcome, [(TEXT[:70], {"max_new_tokens": 72})])
    return snapshot(engine, outcome)


def turns(engine: InProcessEngine) -> Outcome:
    """Three turns, each resuming from the boundary state that the one before left."""
    outcome, prompt = Outcome(), TEXT[:90]
    for turn in range(3):
        _run(engine, outcome, [(prompt, {"max_new_tokens": 50})])
        prompt = prompt + outcome.ids[f"request {turn}"] + TEXT[700 + turn : 709 + turn]
    return snapshot(engine, outcome)


def batch(engine: InProcessEngine) -> Outcome:
    """NUM_BATCHED requests that end at different steps; every third samples."""
    outcome = Outcome()
    requests = [
        (
            TEXT[i * 40 : i * 40 + 12 + 9 * i],
            {
                "max_new_tokens": 24 + 7 * i,
                "temperature": 0.7 if i % 3 == 2 else 0.0,
                "sampling_seed": i,
            },
        )
        for i in range(NUM_BATCHED)
    ]
    _run(engine, outcome, requests)
    return snapshot(engine, outcome)


def few(engine: InProcessEngine) -> Outcome:
    """Three greedy requests, fewer than a captured batch of eight has rows."""
    outcome = Outcome()
    requests = [(TEXT[i * 50 : i * 50 + 30 + 7 * i], {"max_new_tokens": 60}) for i in range(3)]
    _run(engine, outcome, requests)
    return snapshot(engine, outcome)


WORKLOADS: dict[str, Callable[[InProcessEngine], Outcome]] = {
    "single": single,
    "turns": turns,
    "batch": batch,
}


def flush(engine: InProcessEngine) -> None:
    """Empty the prefix cache; fails if the engine refuses."""
    engine.scheduler.handle(FlushCacheReqInput(req_id="flush"))
    answer = engine.messages[-1]
    assert isinstance(answer, FlushCacheReqOutput) and answer.success, answer


def poison(engine: InProcessEngine) -> None:
    """NaN in everything that an idle, flushed engine must not read: pools, scratch, free memory."""
    state_pool = engine.built.pools.req_pool.mamba_pool
    pools = [state_pool, *kv_pools(engine)]
    for pool in pools:
        for tensor in pool.named_tensors().values():
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
    free = [torch.full((size,), float("nan"), device=state_pool.device) for size in (1 << 26, 4096)]
    del free


@dataclass
class Touched:
    """Slots handed out since recording began."""

    states: set[int] = field(default_factory=set)
    kv: set[int] = field(default_factory=set)


@contextmanager
def recorded_slots(engine: InProcessEngine) -> Iterator[Touched]:
    """Note every state and KV slot that the allocators hand out inside the block."""
    touched = Touched()
    states = engine.built.pools.req_pool.mamba_allocator
    tokens = engine.built.pools.token_allocator
    take_ids, take_tensor, take_kv = states.alloc_ids, states.alloc, tokens.alloc

    def alloc_ids(n: int) -> list[int] | None:
        ids = take_ids(n)
        touched.states.update(ids or ())
        return ids

    def alloc(n: int) -> Tensor | None:
        ids = take_tensor(n)
        touched.states.update(() if ids is None else ids.tolist())
        return ids

    def alloc_kv(num_tokens: int):
        slots = take_kv(num_tokens)
        touched.kv.update(() if slots is None else slots.tolist())
        return slots

    with (
        mock.patch.object(states, "alloc_ids", alloc_ids),
        mock.patch.object(states, "alloc", alloc),
        mock.patch.object(tokens, "alloc", alloc_kv),
    ):
        yield touched


def written_outside(engine: InProcessEngine, touched: Touched) -> list[str]:
    """What a run after ``poison`` wrote although it was never handed out, padding included."""
    found = []
    for name, tensor in engine.state_tensors().items():
        rows = _written(tensor.transpose(0, 1)) - touched.states
        found += [f"state slot {row} of {name}" for row in sorted(rows)]
    for number, pool in enumerate(kv_pools(engine)):
        for name, tensor in pool.named_tensors().items():
            rows = _written(tensor) - touched.kv
            found += [f"KV slot {row} of {name} of pool {number}" for row in sorted(rows)[:3]]
    return found


def written_scratch_rows(engine: InProcessEngine) -> dict[str, set[int]]:
    """Rows of the verify scratch that a run after ``poison`` wrote, by tensor."""
    pool = engine.built.pools.req_pool.mamba_pool
    own = {"temporal", *(f"conv.{i}" for i in range(len(pool.mamba_cache.conv)))}
    return {
        name: _written(tensor.transpose(0, 1))
        for name, tensor in pool.named_tensors().items()
        if name not in own and tensor.is_floating_point()
    }


def _written(tensor: Tensor) -> set[int]:
    """Rows with a value that is not NaN."""
    values = tensor.reshape(tensor.shape[0], -1)
    return set(torch.nonzero(~values.isnan().all(1)).reshape(-1).tolist())
