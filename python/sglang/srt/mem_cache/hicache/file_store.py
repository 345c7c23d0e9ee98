"""Byte rows in files of one directory, written behind, verified when read."""

from __future__ import annotations

import errno
import logging
import os
import queue
import shutil
import stat
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

logger = logging.getLogger(__name__)

_MAGIC = b"HICACHE1"
_CHECKSUM_BYTES = 32
_SUFFIX = ".row"
_PART = ".part"
_LEFTOVER_SECONDS = 3600
_MAX_WAITING_BYTES = 1 << 30
"""Rows waiting for the writer are copies in memory, so their bytes are bounded, not their number."""
MIN_FREE_SHARE = 0.1
"""Share of its disk that the file tier leaves free."""
_REMOVED_PER_ROW = 4
"""Old rows that one new row may replace: a disk that others fill empties the tier step by step."""


def _checksum(name: bytes, row: bytes) -> bytes:
    return blake2b(name + row, digest_size=_CHECKSUM_BYTES).digest()


class FileStore:
    """Rows of one kind under ``directory``, one file each.

    A file appears whole or not at all (written under another name, then renamed). A file that is
    short, altered or of another layout is a miss: it is removed and never read again. Rows wait in a
    queue for one writer thread; when it holds a gigabyte, rows are left out rather than waited for.
    Where a row would leave less than a tenth of the disk free, the rows used least recently make room.
    """

    def __init__(self, directory: Path, row_bytes: int) -> None:
        self._directory = directory
        self._row_bytes = row_bytes
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if not os.access(directory, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            names = [entry.name for entry in sorted(os.scandir(directory), key=_age)]
            self._remove_leftovers(names)
        except OSError as error:
            raise ValueError(
                f"--hicache-storage-dir: cannot use {directory}: {error.strerror}; give a directory "
                "that can be written"
            ) from error
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, None] = OrderedDict(
            (bytes.fromhex(name.removesuffix(_SUFFIX)), None)
            for name in names
            if name.endswith(_SUFFIX) and _is_hex(name.removesuffix(_SUFFIX))
        )
        self._queue: queue.Queue[tuple[bytes, bytes] | None] = queue.Queue()
        self._waiting_bytes = 0
        self._failed = False
        self.num_damaged = 0
        self._writer = threading.Thread(target=self._write_loop, daemon=True)
        self._writer.start()

    def _remove_leftovers(self, names: list[str]) -> None:
        """Files that a killed server was writing; recent ones may belong to another server."""
        for name in names:
            path = self._directory / name
            with suppress(FileNotFoundError):
                if name.endswith(_PART) and time.time() - path.stat().st_mtime > _LEFTOVER_SECONDS:
                    path.unlink()

    def __contains__(self, digest: bytes) -> bool:
        with self._lock:
            return digest in self._known

    def __len__(self) -> int:
        with self._lock:
            return len(self._known)

    def _path(self, digest: bytes) -> Path:
        return self._directory / (digest.hex() + _SUFFIX)

    def put(self, digest: bytes, row: bytes) -> None:
        """Queue a row for writing, unless it is there already."""
        if self._failed or digest in self:
            return
        with self._lock:
            waiting = self._waiting_bytes
            if waiting and waiting + len(row) > _MAX_WAITING_BYTES:
                logger.debug("the file tier is behind; one row is left out")
                return
            self._waiting_bytes += len(row)
        self._queue.put((digest, row))

    def touch(self, digests: Iterable[bytes]) -> None:
        """Make rows the youngest, the last of them youngest of all."""
        with self._lock:
            for digest in digests:
                if digest in self._known:
                    self._known.move_to_end(digest)

    def get(self, digest: bytes) -> bytes | None:
        """A verified row, or None; what fails the check is removed."""
        if digest not in self:
            return None
        path = self._path(digest)
        try:
            content = self._read(path)
        except FileNotFoundError:
            self._forget(digest)
            return None
        except OSError as error:
            content = b""
            logger.warning("cannot read %s: %s", path, error.strerror)
        head = len(_MAGIC) + _CHECKSUM_BYTES
        row = content[head:]
        if content[: len(_MAGIC)] == _MAGIC and content[len(_MAGIC) : head] == _checksum(
            digest, row
        ):
            return row
        self.num_damaged += 1
        logger.warning("%s is damaged and is left out; its prefix will be computed again", path)
        self.remove(digest)
        return None

    def _read(self, path: Path) -> bytes:
        """The file's bytes, none of them if it is not a plain file of a row's size; marks its use."""
        status = path.stat()
        size = len(_MAGIC) + _CHECKSUM_BYTES + self._row_bytes
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            return b""
        content = path.read_bytes()
        with suppress(OSError):
            os.utime(path)
        return content if len(content) == size else b""

    def _forget(self, digest: bytes) -> None:
        with self._lock:
            self._known.pop(digest, None)

    def remove(self, digest: bytes) -> None:
        """Forget a row, and its file if that can be removed."""
        self._forget(digest)
        try:
            self._path(digest).unlink(missing_ok=True)
        except OSError as error:
            logger.warning("cannot remove %s: %s", self._path(digest), error.strerror)

    def clear(self) -> None:
        """Remove every row, those still waiting included."""
        self.drain()
        with self._lock:
            known = list(self._known)
        for digest in known:
            self.remove(digest)

    def drain(self) -> None:
        """Wait until everything queued has been written."""
        self._queue.join()

    def close(self) -> None:
        """Write what is queued and end the writer."""
        self._queue.put(None)
        self._writer.join()

    def _write_loop(self) -> None:
        while True:
            item = self._queue.get()
            try:
                if item is None:
                    return
                self._write(*item)
            except OSError as error:
                self._failed = True
                logger.warning("the file tier is off from now on: %s", error)
            finally:
                if item is not None:
                    with self._lock:
                        self._waiting_bytes -= len(item[1])
                self._queue.task_done()

    def _write(self, digest: bytes, row: bytes) -> None:
        if self._failed or digest in self or not self._make_room():
            return
        handle, temporary = tempfile.mkstemp(dir=self._directory, suffix=_PART)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_MAGIC + _checksum(digest, row))
                file.write(row)
            os.replace(temporary, self._path(digest))
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise
        with self._lock:
            self._known[digest] = None

    def _make_room(self) -> bool:
        """Whether another row leaves enough of the disk free, after removing a few of the oldest."""
        disk = shutil.disk_usage(self._directory)
        missing = self._row_bytes + int(MIN_FREE_SHARE * disk.total) - disk.free
        for _ in range(_REMOVED_PER_ROW):
            with self._lock:
                oldest = next(iter(self._known), None)
            if missing <= 0 or oldest is None:
                break
            self.remove(oldest)
            missing -= self._row_bytes
        if missing > 0:
            logger.debug("the disk of the file tier is nearly full; one row is left out")
        return missing <= 0


def _is_hex(text: str) -> bool:
    return bool(text) and len(text) % 2 == 0 and all(c in "0123456789abcdef" for c in text)


def _age(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_mtime_ns
    except FileNotFoundError:  # another server has removed it meanwhile
        return 0
