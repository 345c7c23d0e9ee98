"""A memory system of tiny pools under a fake model whose KV and states name the tokens they hold.

KV of position i and the state after n tokens are hashes of the prefix. The fake model reads its
prefix before it writes, so that a wrong state slot, a state of another length, a page freed too
early or a row that points elsewhere shows at once, whatever the cache did to cause it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.hicache.build import HostTierSettings, build_host_tier
from sglang.srt.mem_cache.hierarchical_cache import HierarchicalCache
from sglang.srt.mem_cache.pool.kv_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool.req_pool import HybridReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.req_kv import ReqKV
from sglang.srt.mem_cache.request_memory import RequestMemory
from sglang.srt.mem_cache.request_slots import RequestSlots
from sglang.srt.mem_cache.track import (
    TrackGrids,
    TrackPolicy,
    crossing_step,
    decode_track_rows,
)

_MODULUS = (1 << 23) - 15


def prefix_hashes(token_ids: Sequence[int]) -> list[int]:
    """Hash of every prefix; entry n belongs to the first n tokens. Exact in float32."""
    hashes = [1]
    for token in token_ids:
        hashes.append((hashes[-1] * 8191 + token + 7) % _MODULUS)
    return hashes


@dataclass(eq=False)
class RigRequest:
    """The least that a request needs to be."""

    prompt: list[int]
    max_new_tokens: int = 8
    kv: ReqKV = field(default_factory=ReqKV)
    output: list[int] = field(default_factory=list)
    reported_cached: int = -1

    def token_ids(self) -> list[int]:
        return self.prompt + self.output


def tiny_cache_params(num_layers: int = 2) -> Mamba2CacheParams:
    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=2,
        n_groups=1,
        num_heads=1,
        head_dim=2,
        state_size=2,
        conv_kernel=4,
    )
    dtype = Mamba2StateDType(conv=torch.float32, temporal=torch.float32)
    return Mamba2CacheParams(shape=shape, dtype=dtype, layers=list(range(num_layers)))


@dataclass(frozen=True)
class RigConfig:
    num_tokens: int = 256
    num_states: int = 12
    num_rows: int = 4
    page_size: int = 4
    state_chunk: int = 8
    track_interval: int = 16
    strategy: str = "extra_buffer"
    overlap: bool = False
    max_step_tokens: int = 4
    max_context_len: int = 192
    radix: bool = True
    host_ratio: float = 0.0
    write_policy: str = "write_through"
    storage_dir: Path | None = None
    device: str = "cpu"


class MemoryRig:
    """Pools, tree and RequestMemory of one configuration, with the fake model's steps."""

    memory_type = RequestMemory
    tree_type = RadixCache

    def __init__(self, config: RigConfig) -> None:
        self.config = config
        grids = TrackGrids.resolve(
            page_size=config.page_size,
            track_interval=config.track_interval,
            state_chunk=config.state_chunk,
        )
        self.policy = None
        if config.radix:
            self.policy = TrackPolicy.resolve(
                strategy=config.strategy,
                grids=grids,
                overlap_schedule=config.overlap,
                max_step_tokens=config.max_step_tokens,
            )
        self.grids = grids
        self.pool = HybridReqToTokenPool(
            size=config.num_rows,
            mamba_size=config.num_states,
            mamba_spec_state_size=config.num_rows,
            max_context_len=config.max_context_len,
            device=config.device,
            enable_memory_saver=False,
            cache_params=tiny_cache_params(),
            mamba_layer_ids=[0, 1],
            enable_mamba_extra_buffer=config.radix and config.strategy != "no_buffer",
            enable_mamba_extra_buffer_lazy=config.strategy == "extra_buffer_lazy",
            enable_overlap_schedule=config.overlap,
        )
        self.allocator = PagedTokenToKVPoolAllocator(config.num_tokens, config.page_size)
        self.kv_pool = MHATokenToKVPool(
            config.num_tokens, config.page_size, torch.float32, 1, 2, 2, config.device
        )
        self.tree = self._build_tree() if config.radix else None
        self.host = self._build_host()
        self.memory = self.memory_type(
            slots=RequestSlots(self.pool),
            allocator=self.allocator,
            tree=self.tree,
            policy=self.policy,
            host=self.host,
        )
        self.num_checks = 0

    def _build_tree(self) -> RadixCache:
        return self.tree_type(
            page_size=self.config.page_size,
            checkpoint_tokens=self.grids.checkpoint_tokens,
            needs_state=True,
            free_kv=self.allocator.free,
            free_state=self.pool.mamba_allocator.free,
        )

    def _build_host(self) -> HierarchicalCache | None:
        config = self.config
        if not config.host_ratio or self.tree is None:
            return None
        settings = HostTierSettings(
            ratio=config.host_ratio,
            write_policy=config.write_policy,
            storage_dir=config.storage_dir,
            identity={"model": "rig"},
        )
        return build_host_tier(
            tree=self.tree,
            kv_pools=[self.kv_pool],
            mamba_pool=self.pool.mamba_pool,
            settings=settings,
        )

    # -- contents

    def _states(self) -> list[torch.Tensor]:
        cache = self.pool.mamba_pool.mamba_cache
        return [*cache.conv, cache.temporal]

    def _write_state(self, slot: int, value: int) -> None:
        for tensor in self._states():
            tensor[:, slot] = float(value)

    def _check_state(self, slot: int, value: int, what: str) -> None:
        self.num_checks += 1
        for tensor in self._states():
            found = tensor[:, slot]
            assert torch.equal(found, torch.full_like(found, float(value))), (
                f"{what}: state slot {slot} holds {found.flatten()[0].item()}, not {value}"
            )

    def _slots_of(self, req: RigRequest, start: int, end: int) -> torch.Tensor:
        return self.pool.req_to_token[req.kv.req_pool_idx, start:end].long()

    def _write_kv(self, req: RigRequest, start: int, values: list[int]) -> None:
        rows = torch.tensor(values, dtype=torch.float32, device=self.config.device)
        rows = rows[:, None, None].expand(-1, 1, 2)
        slots = self._slots_of(req, start, start + len(values))
        for layer in range(2):
            self.kv_pool.set_kv_buffer(layer, slots, rows, -rows)

    def _check_kv(self, req: RigRequest, values: list[int]) -> None:
        self.num_checks += 1
        want = torch.tensor(values, dtype=torch.float32, device=self.config.device)
        want = want[:, None, None].expand(-1, 1, 2)
        slots = self._slots_of(req, 0, len(values))
        for layer in range(2):
            k, v = self.kv_pool.get_kv_buffer(layer)
            assert torch.equal(k[slots], want), "KV of the prefix is wrong"
            assert torch.equal(v[slots], -want), "KV of the prefix is wrong"

    def check_prefix(self, req: RigRequest) -> None:
        """Everything committed is there: KV of every position and the state after the last."""
        hashes = prefix_hashes(req.token_ids())
        length = req.kv.committed_len
        self._check_state(
            req.kv.mamba_pool_idx, hashes[length] if length else 0, f"working state at {length}"
        )
        self._check_kv(req, hashes[1 : length + 1])

    def check_tree(self) -> None:
        """Every state and every page in the tree belongs to the prefix it is filed under."""
        if self.tree is None:
            return
        for node in self.tree.nodes():
            key = torch.frombuffer(bytearray(node.token_bytes()), dtype=torch.int32).tolist()
            hashes = prefix_hashes(key)
            if node.state_slot >= 0:
                self._check_state(node.state_slot, hashes[-1], f"tree state at {node.end}")
            want = torch.tensor(hashes[node.start + 1 :], dtype=torch.float32)
            slots = torch.from_numpy(node.slots)
            assert torch.equal(self.kv_pool.get_key_buffer(0)[slots, 0, 0].cpu(), want)

    # -- steps, as the scheduler would make them

    def admit(self, req: RigRequest, chunk: int) -> bool:
        tokens = req.token_ids()
        limit = len(tokens) - 1
        match = self.memory.match(tokens[:limit])
        wanted = min(chunk, len(tokens) - match.usable_len)
        if not self.memory.admit(req, token_ids=tokens[:limit], num_new_tokens=wanted):
            return False
        assert req.kv.allocated_len >= req.kv.committed_len + wanted, "pages for the first chunk"
        if req.reported_cached < 0:
            req.reported_cached = req.kv.cached_len
        self.check_prefix(req)
        return True

    def prefill(self, req: RigRequest, chunk: int) -> bool:
        """One chunk; True if there was room for it."""
        tokens = req.token_ids()
        start = req.kv.committed_len
        end = min(len(tokens), start + chunk)
        if not self.memory.ensure(req, end):
            return False
        self.check_prefix(req)
        slot, rows = self.memory.track_rows_for_extend(req, start, end)
        hashes = prefix_hashes(tokens)
        self._write_kv(req, start, hashes[start + 1 : end + 1])
        self._write_state(req.kv.mamba_pool_idx, hashes[end])
        if slot >= 0:
            self._write_state(slot, hashes[start + rows])
        req.kv.committed_len = end
        if slot >= 0:
            self.memory.note_track(req, start + rows)
        self.memory.cache_unfinished(req, tokens[:end])
        return True

    def is_prefilled(self, req: RigRequest) -> bool:
        return bool(req.output) and req.kv.committed_len >= len(req.token_ids()) - 1

    def step(self, req: RigRequest, num_accepted: int, keep: int, new_tokens: list[int]) -> bool:
        """A decode (1 accepted) or verify step that commits ``num_accepted`` rows.

        ``new_tokens`` are the tokens emitted (``num_accepted`` of them, the bonus last); only ``keep``
        of them stay when the request ends inside the block.
        """
        width = self.config.max_step_tokens
        pre = req.kv.committed_len
        if not self.memory.ensure(req, pre + width):
            return False
        self.check_prefix(req)
        slot = self.memory.track_slot_for_decode(req, width)
        rows = req.token_ids()[: pre + 1] + new_tokens
        hashes = prefix_hashes(rows[: pre + num_accepted])
        rejected = [999 + i for i in range(width - num_accepted)]
        self._write_kv(req, pre, hashes[pre + 1 :] + rejected)
        grid = self.grids.track_tokens
        if num_accepted == 1:
            stored = decode_track_rows(pre + 1, grid)
        else:
            stored = crossing_step(pre, num_accepted, grid) + 1
        tracked = -1
        if slot >= 0 and stored > 0:
            tracked = pre + stored
            self._write_state(slot, hashes[tracked])
        may_have_none = self.policy is None or self.policy.is_lazy or not self.policy.num_entries
        assert slot >= 0 or stored <= 0 or may_have_none
        self._write_state(req.kv.mamba_pool_idx, hashes[pre + num_accepted])
        req.kv.committed_len = pre + num_accepted
        if tracked >= 0:
            self.memory.note_track(req, tracked)
        req.output += new_tokens[:keep]
        return True

    def finish(self, req: RigRequest) -> None:
        final = min(req.kv.committed_len, len(req.token_ids()))
        self.memory.finish(req, req.token_ids()[:final])

    def retract(self, req: RigRequest) -> None:
        self.memory.retract(req, req.token_ids()[: req.kv.committed_len])

    def check(self) -> None:
        self.memory.check_integrity()
        self.check_tree()

    def check_idle_and_empty(self) -> None:
        """After a flush nothing is held anywhere."""
        assert self.memory.flush()
        self.check()
        assert self.allocator.available_size() == self.allocator.size
        assert self.pool.mamba_allocator.available_size() == self.pool.mamba_allocator.size
        assert self.pool.available_size() == self.pool.size


class RandomTraffic:
    """Random requests over few tokens on a rig: admission, chunks, steps, abort, retraction."""

    def __init__(self, rig: MemoryRig, seed: int, *, longest_prompt: int = 90) -> None:
        self.rig = rig
        self.rng = random.Random(seed)
        self.longest_prompt = longest_prompt
        self.waiting: list[RigRequest] = []
        self.active: list[RigRequest] = []
        self.finished: list[RigRequest] = []
        self.counts: dict[str, int] = {}

    def _count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    def prompt(self) -> list[int]:
        rng = self.rng
        if self.finished and rng.random() < 0.45:
            base = rng.choice(self.finished[-12:]).token_ids()
            base = base[: rng.randint(1, len(base))]
        else:
            base = [rng.choice([3, 5])] * rng.randint(1, 40)
        base = base + [rng.randint(1, 9) for _ in range(rng.randint(1, 30))]
        return base[: self.longest_prompt]

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._one()
            self.rig.check()
        self.drain()

    def _one(self) -> None:
        rng = self.rng
        if len(self.waiting) < 3 and rng.random() < 0.4:
            self.waiting.append(RigRequest(self.prompt(), rng.randint(1, 40)))
        if self.waiting and rng.random() < 0.5:
            self._admit(self.waiting[0])
        if self.active and rng.random() < 0.03:
            victim = self.active.pop(rng.randrange(len(self.active)))
            self.rig.memory.release(victim)
            self._count("aborted")
        if self.active and rng.random() < 0.03:
            self._retract(rng.choice(self.active))
        if self.active:
            self._advance(rng.choice(self.active))
        if rng.random() < 0.01:
            if self.rig.memory.flush():
                self._count("flushed")

    def _admit(self, req: RigRequest) -> None:
        before = self.rig.memory.stats() if not self.active else None
        if self.rig.admit(req, self.rng.choice([8, 16, 24, 64])):
            self._count("admitted")
            if req.kv.cached_len:
                self._count("hit")
            self.waiting.remove(req)
            self.active.append(req)
        else:
            assert req.kv.req_pool_idx is None and not req.kv.holds_mamba
            assert before is None, f"a request alone was not admitted: {before}"
            self._count("not admitted")

    def _retract(self, req: RigRequest) -> None:
        self.active.remove(req)
        self.rig.retract(req)
        self.waiting.insert(0, req)
        self._count("retracted")

    def _advance(self, req: RigRequest) -> None:
        rng, rig = self.rng, self.rig
        if not rig.is_prefilled(req):
            done = rig.prefill(req, rng.choice([8, 16, 24, 40]))
            if done and req.kv.committed_len == len(req.token_ids()):
                req.output.append(rng.randint(1, 9))
        else:
            width = rig.config.max_step_tokens
            accepted = rng.randint(1, width)
            left = req.max_new_tokens - len(req.output)
            keep = min(accepted, max(left, 1), rng.choice([accepted] * 9 + [1]))
            new = [rng.randint(1, 9) for _ in range(accepted)]
            done = rig.step(req, accepted, keep, new)
            if done:
                self._count("stepped")
                ends = keep < accepted or len(req.output) >= req.max_new_tokens
                if ends or len(req.token_ids()) + width >= rig.config.max_context_len:
                    self._finish(req)
        if not done:
            self._retract(max(self.active, key=lambda r: len(r.token_ids())))

    def _finish(self, req: RigRequest) -> None:
        self.active.remove(req)
        self.rig.finish(req)
        self.finished.append(req)
        self._count("finished")

    def drain(self) -> None:
        """End everything and require that nothing is left."""
        for req in self.active:
            self.rig.memory.release(req)
        self.active.clear()
        self.rig.check()
        self.rig.check_idle_and_empty()
