"""The file tier on a bad day: foreign entries, full disks, slow writers, killed servers.

Catches: a server that dies of something in its cache directory, memory or a disk that fills without
bound, a row that is dropped although it was just used.
"""

import dataclasses
import os
import shutil
import threading
from collections import namedtuple
from pathlib import Path

import pytest

from sglang.srt.mem_cache.hicache import file_store
from sglang.srt.mem_cache.hicache.file_store import FileStore
from sglang.srt.mem_cache.hierarchical_cache import FileTier
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.memory_rig import MemoryRig, RigConfig, RigRequest

register_cpu_ci(est_time=5, suite="unit")

NAMES = [bytes([i]) * 16 for i in range(8)]
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def store(tmp_path):
    opened = FileStore(tmp_path / "rows", 4)
    yield opened
    opened.close()


def fill(store, names):
    for name in names:
        store.put(name, name[:4])
        store.drain()


def test_file_store_survives_a_full_disk(tmp_path, monkeypatch):
    store = FileStore(tmp_path / "x", 4)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    store.put(b"a" * 16, b"1234")
    store.drain()
    assert store.get(b"a" * 16) is None and not list(tmp_path.rglob("*.part"))
    store.close()


def test_leftovers_of_a_killed_server_are_removed(tmp_path):
    old, fresh, row = (tmp_path / name for name in ("a.part", "b.part", f"{'0' * 32}.row"))
    for path in (old, fresh, row):
        path.write_bytes(b"x")
    os.utime(old, (0, 0))
    store = FileStore(tmp_path, 4)
    assert sorted(tmp_path.iterdir()) == sorted([fresh, row]) and len(store) == 1
    store.close()


@pytest.mark.parametrize("kind", ["folder", "pipe", "huge", "link to nothing"])
def test_an_entry_that_is_no_row_is_a_miss(store, kind):
    """Catches a read that waits for ever or fills the memory, and a removal that kills the server."""
    fill(store, NAMES[:1])
    path = store._path(NAMES[0])
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "huge":
        path.touch()
        os.truncate(path, 1 << 40)
    else:
        path.symlink_to("nowhere")
    assert store.get(NAMES[0]) is None and NAMES[0] not in store
    assert store.get(NAMES[0]) is None
    fill(store, NAMES[1:2])
    assert store.get(NAMES[1]) == NAMES[1][:4]


def test_a_directory_that_cannot_be_written_is_a_miss(store, monkeypatch):
    fill(store, NAMES[:1])
    store._path(NAMES[0]).write_bytes(b"x")

    def refuse(self, missing_ok=False):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(file_store.Path, "unlink", refuse)
    assert store.get(NAMES[0]) is None and len(store) == 0
    store.clear()


def test_a_directory_that_can_only_be_read_is_refused_at_start(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    with pytest.raises(
        ValueError, match="--hicache-storage-dir.*give a directory that can be written"
    ):
        FileStore(tmp_path, 4)


def test_a_home_directory_may_be_abbreviated(tmp_path, monkeypatch):
    """Arguments from a file reach us without a shell: ``~`` must not become a folder of that name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    files = FileTier.open(Path("~/cache"), b"x", 4, None)
    assert files.pages._directory.is_relative_to(tmp_path / "cache")
    files.pages.close()


def test_a_file_that_someone_removed_is_a_quiet_miss(store, caplog):
    fill(store, NAMES[:1])
    store._path(NAMES[0]).unlink()
    assert store.get(NAMES[0]) is None and store.num_damaged == 0 and not caplog.records


def test_rows_that_wait_for_the_writer_are_bounded_in_bytes(store, monkeypatch):
    """Catches a queue that counts rows: a thousand states of a large model are 60 GB."""
    monkeypatch.setattr(file_store, "_MAX_WAITING_BYTES", 10)
    gate = threading.Event()
    write = store._write
    monkeypatch.setattr(store, "_write", lambda *item: (gate.wait(20), write(*item)))
    for name in NAMES:
        store.put(name, name[:4])
    assert store._waiting_bytes <= 10
    gate.set()
    store.drain()
    assert len(store) == 2 and store._waiting_bytes == 0
    monkeypatch.setattr(file_store, "_MAX_WAITING_BYTES", 3)
    fill(store, NAMES[5:6])  # larger than the bound, but nothing else waits
    assert store.get(NAMES[5]) == NAMES[5][:4]


def nearly_full(monkeypatch, store, rows):
    """A disk of 1000 bytes on which ``rows`` rows fit beside what must stay free."""

    def usage(path):
        used = 4 * len(store)
        return Usage(1000, used, 100 + 4 * rows - used)

    monkeypatch.setattr(shutil, "disk_usage", usage)


def test_a_full_disk_drops_the_rows_used_least_recently(store, monkeypatch):
    nearly_full(monkeypatch, store, 3)
    fill(store, NAMES[:3])
    store.touch(NAMES[:1])
    fill(store, NAMES[3:4])
    assert [name in store for name in NAMES[:4]] == [True, False, True, True]
    assert len(list(store._directory.iterdir())) == 3
    nearly_full(monkeypatch, store, -100)
    fill(store, NAMES[4:5])
    assert len(store) == 0 and NAMES[4] not in store  # others have filled the disk


def test_use_survives_a_restart(tmp_path, monkeypatch):
    store = FileStore(tmp_path, 4)
    fill(store, NAMES[:3])
    for age, name in enumerate(NAMES[:3]):
        os.utime(store._path(name), (age, age))
    assert store.get(NAMES[0]) is not None  # the oldest is read, and so the youngest
    store.close()
    store = FileStore(tmp_path, 4)
    nearly_full(monkeypatch, store, 3)
    fill(store, NAMES[3:4])
    assert [name in store for name in NAMES[:4]] == [True, False, True, True]
    store.close()


def serve(rig, prompt):
    """One request through the fake model, which checks what it reads; the cached length it reports."""
    req = RigRequest(list(prompt), 1)
    assert rig.admit(req, 32)
    while req.kv.committed_len < len(req.token_ids()):
        assert rig.prefill(req, 32)
    req.output.append(77)
    rig.finish(req)
    rig.check()
    return req.reported_cached


def test_a_killed_server_leaves_files_that_the_next_one_can_use(tmp_path):
    """No orderly end: whatever was written by then is whole, and the rest is not there."""
    config = RigConfig(num_tokens=160, max_context_len=120, host_ratio=8.0, storage_dir=tmp_path)
    prompt = [(i * 5) % 97 for i in range(80)]
    killed = MemoryRig(config)
    serve(killed, prompt)
    killed.host.wait()
    (next(tmp_path.rglob("pages")) / "half.part").write_bytes(b"x" * 7)
    rig = MemoryRig(dataclasses.replace(config))
    assert serve(rig, prompt + [1]) == 80
    for path in tmp_path.rglob("states/*.row"):
        path.unlink()
        path.mkdir()
    again = MemoryRig(config)
    assert serve(again, prompt + [2]) == 0
    for each in (killed, rig, again):
        each.host.close()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
