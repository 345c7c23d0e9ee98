"""Host and file tiers: what leaves the tree comes back, and never as something else.

Catches: a state paired with other tokens, pages of another prefix, an entry overwritten while it is
read, a damaged or foreign file taken for good, copies that lose bits of any dtype.
"""

import dataclasses

import numpy as np
import pytest
import torch

from sglang.srt.mem_cache.hicache import build
from sglang.srt.mem_cache.hicache.blob_io import BlobIO
from sglang.srt.mem_cache.hicache.file_store import FileStore
from sglang.srt.mem_cache.hicache.host_store import HostStore
from sglang.srt.mem_cache.hicache.pinned import PinnedRows
from sglang.srt.mem_cache.hierarchical_cache import (
    HierarchicalCache,
    HostTierSize,
    fingerprint_of,
)
from sglang.srt.mem_cache.integrity import IntegrityError
from sglang.srt.mem_cache.radix.node import token_key
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.memory_rig import MemoryRig, RandomTraffic, RigConfig, RigRequest

register_cpu_ci(est_time=30, suite="unit")

SMALL = RigConfig(num_tokens=160, max_context_len=120, num_states=5, host_ratio=8.0)


def serve(rig, prompt, num_output=3, chunk=32):
    """One request from admission to finish; returns its reported cached length."""
    req = RigRequest(list(prompt), num_output)
    assert rig.admit(req, chunk)
    while req.kv.committed_len < len(req.token_ids()):
        assert rig.prefill(req, chunk)
    req.output.append(77)
    while len(req.output) < num_output:
        assert rig.step(req, 1, 1, [78])
    rig.finish(req)
    rig.check()
    return req.reported_cached


def prompt_of(length, salt):
    return [(i * 5 + salt * 13) % 97 for i in range(length)]


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("strategy", ["extra_buffer", "extra_buffer_lazy", "no_buffer"])
def test_evicted_prefix_comes_back(policy, strategy):
    page = 1 if strategy == "no_buffer" else 4
    config = dataclasses.replace(SMALL, write_policy=policy, strategy=strategy, page_size=page)
    rig = MemoryRig(config)
    for salt in range(6):
        assert serve(rig, prompt_of(80, salt)) == 0
    assert rig.memory.match(prompt_of(80, 0)).cached_len == 0  # long gone from the device
    found = rig.memory.match(prompt_of(80, 0) + [1])
    assert found.host_len == 80 and found.usable_len == 80
    assert serve(rig, prompt_of(80, 0) + [1]) == 80
    assert rig.host.stats()["loads_ct"] == 1
    rig.check_idle_and_empty()
    assert rig.host.stats()["host_pages"] == 0


def test_state_evicted_alone_comes_back_without_its_pages():
    """A tombstone: the KV is still on the device, only the state has moved to the host."""
    rig = MemoryRig(dataclasses.replace(SMALL, num_tokens=1024, num_states=4))
    serve(rig, prompt_of(64, 0))
    serve(rig, prompt_of(64, 1))
    rig.tree.evict_states(9)
    found = rig.memory.match(prompt_of(64, 0))
    assert (found.cached_len, found.kv_matched_len, found.host_len) == (0, 64, 64)
    assert serve(rig, prompt_of(64, 0) + [5]) == 64
    assert rig.host.stats()["loaded_tokens_ct"] == 0


def test_asking_changes_nothing():
    rig = MemoryRig(SMALL)
    for salt in range(5):
        serve(rig, prompt_of(80, salt))
    order = list(rig.host._pages.store._index)
    before = (rig.memory.stats(), rig.host.stats())
    for salt in range(5):
        rig.memory.match(prompt_of(80, salt))
    assert (rig.memory.stats(), rig.host.stats()) == before
    assert list(rig.host._pages.store._index) == order


def test_refused_admission_loads_nothing():
    rig = MemoryRig(dataclasses.replace(SMALL, num_rows=1))
    for salt in range(5):
        serve(rig, prompt_of(80, salt))
    blocker = RigRequest(prompt_of(100, 9))
    assert rig.admit(blocker, 100)
    before = rig.memory.stats()
    waiting = RigRequest(prompt_of(80, 0) + [1])
    assert not rig.memory.admit(waiting, token_ids=waiting.prompt, num_new_tokens=1)
    assert rig.memory.stats() == before and rig.host.stats()["loads_ct"] == 0
    rig.host.check_integrity()
    rig.memory.release(blocker)


CONFIGS = {
    "through": SMALL,
    "back": dataclasses.replace(SMALL, write_policy="write_back"),
    "tiny-host": dataclasses.replace(SMALL, host_ratio=0.4),
    "pair": dataclasses.replace(SMALL, overlap=True),
    "lazy": dataclasses.replace(SMALL, strategy="extra_buffer_lazy", num_states=3),
    "no-buffer": dataclasses.replace(SMALL, strategy="no_buffer", page_size=1),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_random_traffic(name):
    """The model of test_request_memory_model with tiers behind the tree."""
    traffic = RandomTraffic(MemoryRig(CONFIGS[name]), seed=len(name), longest_prompt=80)
    traffic.run(600)
    assert traffic.rig.host.loads_ct > (0 if name == "tiny-host" else 10)


def test_random_traffic_with_files_and_damage(tmp_path):
    """Every so often files are altered, cut or removed; text stays right."""
    rig = MemoryRig(dataclasses.replace(SMALL, host_ratio=0.4, storage_dir=tmp_path))
    traffic = RandomTraffic(rig, seed=3, longest_prompt=80)
    for i in range(500):
        traffic._one()
        rig.check()
        if i % 20 == 0:
            rig.host.wait()
            files = sorted(tmp_path.rglob("*.row"))
            for path in traffic.rng.sample(files, min(3, len(files))):
                damage(path, traffic.rng.choice(["flip", "cut", "remove", "empty"]))
    assert rig.host.loads_ct > 10 and rig.host._pages._files.num_damaged > 0
    traffic.drain()
    rig.host.close()
    assert not list(tmp_path.rglob("*.row"))


def damage(path, kind):
    content = bytearray(path.read_bytes())
    if kind == "flip" and content:
        content[len(content) // 2] ^= 1
    elif kind == "cut":
        content = content[:-1]
    elif kind == "empty":
        content = bytearray()
    if kind == "remove":
        path.unlink()
    else:
        path.write_bytes(content)


def restarted(rig):
    """The same configuration over the same files, nothing in memory."""
    rig.host.close()
    return MemoryRig(rig.config)


def test_restart_reuses_files(tmp_path):
    rig = MemoryRig(dataclasses.replace(SMALL, storage_dir=tmp_path))
    serve(rig, prompt_of(80, 0))
    rig = restarted(rig)
    assert serve(rig, prompt_of(80, 0) + [1]) == 80
    rig.host.close()


@pytest.mark.parametrize("kind", ["flip", "cut", "remove", "empty"])
@pytest.mark.parametrize("victim", ["pages", "states"])
def test_damaged_file_is_a_miss(tmp_path, kind, victim):
    rig = MemoryRig(dataclasses.replace(SMALL, storage_dir=tmp_path))
    serve(rig, prompt_of(80, 0))
    rig = restarted(rig)
    for path in tmp_path.rglob(f"{victim}/*.row"):
        damage(path, kind)
    assert serve(rig, prompt_of(80, 0) + [1]) == 0
    rig.host.wait()
    assert serve(rig, prompt_of(80, 0) + [2]) == 80
    rig.host.close()


def test_damage_shortens_the_hit_to_what_is_whole(tmp_path):
    rig = MemoryRig(dataclasses.replace(SMALL, storage_dir=tmp_path))
    serve(rig, prompt_of(80, 0))
    rig = restarted(rig)
    digests = list(rig.host._chain(rig.host._root_digest, token_key(prompt_of(80, 0)), 0))
    damage(rig.host._pages._files._path(digests[9]), "flip")  # tokens 36..39
    assert serve(rig, prompt_of(80, 0) + [1]) == 32  # the state after the first chunk of 32
    rig.host.close()


def test_unchecked_file_would_be_wrong_text(tmp_path, monkeypatch):
    """Control: without the checksum the fake model reads a wrong prefix."""
    rig = MemoryRig(dataclasses.replace(SMALL, storage_dir=tmp_path))
    serve(rig, prompt_of(80, 0))
    rig = restarted(rig)
    for path in tmp_path.rglob("pages/*.row"):
        damage(path, "flip")
    monkeypatch.setattr(FileStore, "get", lambda self, digest: self._path(digest).read_bytes()[40:])
    with pytest.raises(AssertionError, match="KV of the prefix is wrong"):
        serve(rig, prompt_of(80, 0) + [1])
    rig.host.close()


def test_another_fingerprint_never_hits(tmp_path):
    rig = MemoryRig(dataclasses.replace(SMALL, storage_dir=tmp_path))
    serve(rig, prompt_of(80, 0))
    rig.host.close()
    weights = tmp_path / "w.safetensors"
    weights.write_bytes(bytes(1 << 20))
    one = fingerprint_of({"dtype": "bfloat16"}, [weights])
    assert one == fingerprint_of({"dtype": "bfloat16"}, [weights])
    assert one != fingerprint_of({"dtype": "float16"}, [weights])
    content = bytearray(1 << 20)
    content[1 << 19] = 1
    weights.write_bytes(content)
    assert one != fingerprint_of({"dtype": "bfloat16"}, [weights])


def test_digest_without_history_is_caught(monkeypatch):
    """Control: filing pages by their own tokens alone hands out another prefix's KV and state."""
    from hashlib import blake2b

    def chain(self, digest, key, start):
        step = self._page_bytes
        for at in range(start, len(key) - step + 1, step):
            yield blake2b(key[at : at + step], digest_size=16).digest()

    monkeypatch.setattr(HierarchicalCache, "_chain", chain)
    with pytest.raises((AssertionError, IntegrityError)):
        RandomTraffic(MemoryRig(SMALL), seed=1, longest_prompt=80).run(600)


def test_unpinned_rows_are_caught(monkeypatch):
    """Control: eviction into a full host store may replace the rows about to be loaded."""
    monkeypatch.setattr(HostStore, "pin", lambda self, digest: None)
    monkeypatch.setattr(HostStore, "unpin", lambda self, digest: None)
    tiny = dataclasses.replace(SMALL, host_ratio=0.6, write_policy="write_back")
    with pytest.raises((AssertionError, IntegrityError, KeyError)):
        for seed in range(6):
            RandomTraffic(MemoryRig(tiny), seed=seed, longest_prompt=80).run(600)


@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.bfloat16, torch.float32, torch.uint8)])
def test_blobs_keep_every_bit(dtypes):
    """Odd sizes, mixed dtypes, a state axis in the middle: bytes survive, others stay untouched."""
    generator = torch.Generator().manual_seed(0)
    for axis in (0, 1):
        tensors = []
        for i, dtype in enumerate(dtypes):
            shape = (12, 3, 5 + i) if axis == 0 else (3, 12, 5 + i)
            raw = torch.randint(0, 255, (*shape, dtype.itemsize), generator=generator)
            tensors.append(raw.to(torch.uint8).view(dtype).squeeze(-1))
        per_item = 2 if axis == 0 else 1
        io = BlobIO(tensors, slot_axis=axis, slots_per_item=per_item)
        source = np.array([4, 5, 8, 9]) if axis == 0 else np.array([4, 9])
        target = np.array([0, 1, 6, 7]) if axis == 0 else np.array([0, 6])
        before = [t.clone() for t in tensors]
        rows = io.pack(source)
        assert rows.shape == (2, io.item_bytes)
        io.unpack(rows, target)
        for tensor, old in zip(tensors, before):
            moved = old.clone()
            moved.index_copy_(
                axis, torch.from_numpy(target), old.index_select(axis, torch.from_numpy(source))
            )
            assert torch.equal(tensor.view(torch.uint8), moved.view(torch.uint8))


def test_host_store_drops_tails_first():
    io = BlobIO([torch.arange(32.0).reshape(32, 1)], slot_axis=0, slots_per_item=2)
    store = HostStore(io, 4)
    names = [bytes([i]) for i in range(6)]
    store.save(names[:4], np.arange(8))
    store.save(names[4:], np.arange(8, 12))
    assert [n in store for n in names] == [True, True, False, False, True, True]
    store.check_integrity()


def test_rows_survive_any_places():
    """Places that are not consecutive keep their own rows."""
    pool = torch.arange(40.0).reshape(40, 1)
    io = BlobIO([pool], slot_axis=0, slots_per_item=2)
    store = HostStore(io, 9)
    for round_ in range(5):
        names = [bytes([round_, i]) for i in range(7)]
        slots = np.random.default_rng(round_).permutation(20)[:7, None] * 2 + np.arange(2)
        store.save(names, slots.reshape(-1))
        for name, pair in zip(names, slots):
            row = store.read(name).view(torch.float32)
            assert row.tolist() == [float(pair[0]), float(pair[1])]
        store.drop(names[3])
        store.check_integrity()


class FakeDriver:
    """Registers what it is told to, or refuses."""

    def __init__(self, status: int = 0) -> None:
        self.status, self.calls = status, []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls.append(("register", address, size, flags))
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        return 0


def test_pinned_rows_are_registered_once_and_given_back_once(monkeypatch):
    """Catches memory that stays pinned after an engine, and a second release of what is somebody else's."""
    driver = FakeDriver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    pinned = PinnedRows(3, 5000)
    address = pinned.rows.data_ptr()
    assert pinned.rows.shape == (3, 5000) and not pinned.rows.any()
    assert driver.calls == [("register", address, 15000, 0)]
    pinned.close()
    pinned.close()
    assert driver.calls[1:] == [("unregister", address)]
    forgotten = PinnedRows(1, 8)
    address = forgotten.rows.data_ptr()
    del forgotten
    assert driver.calls[3:] == [("unregister", address)]


def test_memory_that_cannot_be_pinned_names_the_flags(monkeypatch):
    driver = FakeDriver(status=2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    with pytest.raises(
        RuntimeError, match="cannot pin 0.00 GiB .*--hicache-size or --hicache-ratio"
    ):
        PinnedRows(3, 5000)
    assert [call[0] for call in driver.calls] == ["register"]


def test_sizes_and_refusals(tmp_path):
    given = {"page_bytes": 100, "state_bytes": 1000, "num_device_pages": 50, "num_device_states": 5}
    given["host_bytes"] = 10**6
    assert HostTierSize.resolve(**given, ratio=2.0, size_gb=0) == HostTierSize(100, 10)
    assert HostTierSize.resolve(**given, ratio=2.0, size_gb=2e-5) == HostTierSize(100, 10)
    with pytest.raises(ValueError, match="--hicache-size 1e-06 .* raise it to at least 2.01e-06"):
        HostTierSize.resolve(**given, ratio=2.0, size_gb=1e-6)
    with pytest.raises(ValueError, match="--hicache-ratio 0.1 .* raise it to at least 0.2"):
        HostTierSize.resolve(**given, ratio=0.1, size_gb=0)
    assert HostTierSize.resolve(**given, ratio=0.2, size_gb=0) == HostTierSize(10, 1)
    assert HostTierSize.resolve(**given, ratio=9, size_gb=2.01e-6) == HostTierSize(10, 1)


@pytest.mark.parametrize(
    ("flags", "asked", "lower"),
    [
        ({"ratio": 200.0, "size_gb": 0.0}, "--hicache-ratio 200", "at most 100"),
        ({"ratio": 1e300, "size_gb": 0.0}, "--hicache-ratio 1e", "at most 100"),
        ({"ratio": 2.0, "size_gb": 0.002}, "--hicache-size 0.002", "at most 0.001"),
        ({"ratio": 2.0, "size_gb": 1e308}, "--hicache-size 1e", "at most 0.001"),
    ],
)
def test_a_tier_beyond_the_host_is_refused(flags, asked, lower):
    """Catches an allocation that the system kills, or an overflow, instead of a sentence."""
    given = {"page_bytes": 100, "state_bytes": 1000, "num_device_pages": 50, "num_device_states": 5}
    with pytest.raises(ValueError) as caught:
        HostTierSize.resolve(**given, **flags, host_bytes=10**6)
    text = str(caught.value)
    assert asked in text and lower in text and "are available" in text


def test_the_tier_is_measured_against_the_host(monkeypatch):
    """Pools of a CPU server are in the same memory and count as taken."""
    monkeypatch.setattr(build, "available_host_memory", lambda: 20_000)
    with pytest.raises(ValueError, match="--hicache-ratio 8 needs .* lower it to at most"):
        MemoryRig(SMALL)


def test_refusals_of_policy_and_directory(tmp_path):
    with pytest.raises(ValueError, match="--hicache-write-policy"):
        MemoryRig(dataclasses.replace(SMALL, write_policy="sometimes"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="--hicache-storage-dir"):
        FileStore(tmp_path / "file", 4)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
