"""Host and file tiers of the prefix cache: what the tree gives up comes back on a hit.

Pages and states are filed by content: the digest of a page covers the model's fingerprint and every
token up to the page's end, and a state is filed under the digest of the page it follows. A state can
therefore never be paired with other tokens, whatever happened to the tree meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

import numpy as np

from sglang.srt.mem_cache.hicache.blob_io import BlobIO
from sglang.srt.mem_cache.hicache.file_store import FileStore
from sglang.srt.mem_cache.hicache.tier import SecuredItems, Tier
from sglang.srt.mem_cache.integrity import IntegrityError
from sglang.srt.mem_cache.plan_table import human_bytes
from sglang.srt.mem_cache.radix.node import TOKEN_BYTES, TreeNode
from sglang.srt.mem_cache.radix_cache import MatchResult, RadixCache

DIGEST_BYTES = 16
WRITE_POLICIES = ("write_through", "write_back")


def _short(text: bytes) -> bytes:
    return blake2b(text, digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True)
class HostTierSize:
    """Items the host tier can hold."""

    num_pages: int
    num_states: int

    @staticmethod
    def resolve(
        *,
        page_bytes: int,
        state_bytes: int,
        num_device_pages: int,
        num_device_states: int,
        ratio: float,
        size_gb: float,
        host_bytes: int,
    ) -> HostTierSize:
        """Both kinds in the proportion of the device's pools.

        ``size_gb`` (10**9 bytes) wins over ``ratio`` when above 0; ``host_bytes`` are available for
        the tier. Raises: ValueError naming the flag, the bytes and the direction when not even one
        page and one state fit, or when the host has too little memory.
        """
        device_bytes = page_bytes * num_device_pages + state_bytes * num_device_states
        unit = device_bytes / 1e9 if size_gb > 0 else 1.0  # of the flag, per multiple of the pools
        scale = (size_gb if size_gb > 0 else ratio) / unit
        flag = f"--hicache-size {size_gb:g}" if size_gb > 0 else f"--hicache-ratio {ratio:g}"
        if scale * device_bytes > host_bytes:
            raise ValueError(
                f"{flag} needs {human_bytes(scale * device_bytes)} of host memory, "
                f"{human_bytes(host_bytes)} are available: lower it to at most "
                f"{_rounded(host_bytes / device_bytes * unit, math.floor)}"
            )
        size = HostTierSize(int(num_device_pages * scale), int(num_device_states * scale))
        if size.num_pages < 1 or (num_device_states and size.num_states < 1):
            counts = [count for count in (num_device_pages, num_device_states) if count]
            raise ValueError(
                f"{flag} holds no page of {page_bytes} bytes with a state of {state_bytes} bytes; "
                f"the device's pools are {device_bytes} bytes, in proportion to which it is divided: "
                f"raise it to at least {_rounded(unit / min(counts), math.ceil)}"
            )
        return size


def _rounded(value: float, rounding: Callable[[float], int]) -> str:
    """Three significant digits, on the side of ``value`` that ``math.floor`` or ``math.ceil`` gives."""
    if value <= 0:
        return "0"
    digits = 2 - math.floor(math.log10(value))
    return f"{rounding(value * 10.0**digits) / 10.0**digits:g}"


@dataclass(frozen=True)
class FileTier:
    """Where the file tier of one model and layout lives."""

    pages: FileStore
    states: FileStore | None

    @staticmethod
    def open(
        directory: Path, fingerprint: bytes, page_bytes: int, state_bytes: int | None
    ) -> FileTier:
        """Use ``directory`` with a folder of its own per fingerprint; create what is missing."""
        root = directory.expanduser() / _short(fingerprint).hex()
        states = None if state_bytes is None else FileStore(root / "states", state_bytes)
        return FileTier(FileStore(root / "pages", page_bytes), states)


@dataclass(frozen=True)
class HostHit:
    """Secured items that extend a device match to ``length`` tokens: pages, and the state there."""

    length: int
    pages: SecuredItems
    state: SecuredItems | None


class HierarchicalCache:
    """Listens to the tree, keeps copies, and brings them back.

    tree          the tree in front; this object becomes its listener
    page_io       KV pages of every pool that shares slot ids (target and draft)
    state_io      recurrent states, or None for a model without
    fingerprint   names weights, configuration and layout; part of every digest
    write_policy  "write_through" copies what enters the tree, "write_back" what leaves it
    """

    def __init__(
        self,
        *,
        tree: RadixCache,
        page_io: BlobIO,
        state_io: BlobIO | None,
        size: HostTierSize,
        fingerprint: bytes,
        write_policy: str = "write_through",
        files: FileTier | None = None,
    ) -> None:
        if write_policy not in WRITE_POLICIES:
            raise ValueError(
                f"--hicache-write-policy {write_policy!r} is not one of {', '.join(WRITE_POLICIES)}"
            )
        if tree.needs_state != (state_io is not None):
            raise ValueError("a tree with states needs a tier with states, and the reverse")
        self._tree = tree
        self._pages = Tier(page_io, size.num_pages, files.pages if files is not None else None)
        self._states: Tier | None = None
        if state_io is not None:
            state_files = files.states if files is not None else None
            self._states = Tier(state_io, size.num_states, state_files)
        self._root_digest = _short(fingerprint)
        self._page_bytes = tree.page_size * TOKEN_BYTES
        self._write_through = write_policy == "write_through"
        self.loaded_tokens_ct = 0
        self.loads_ct = 0
        tree.listener = self

    # -- digests

    def _chain(self, digest: bytes, key: bytes, start: int) -> Iterator[bytes]:
        """Digests of the whole pages of ``key`` from byte ``start`` on, following ``digest``."""
        step = self._page_bytes
        for at in range(start, len(key) - step + 1, step):
            digest = _short(digest + key[at : at + step])
            yield digest

    def _end_digest(self, node: TreeNode) -> bytes:
        """Digest of the last page of a node; fills in the digests of the whole path."""
        digest = self._root_digest
        for step in node.path():
            if step.digests is None:
                step.digests = list(self._chain(digest, step.key, 0))
            digest = step.digests[-1]
        return digest

    # -- what the tree tells

    def on_insert_kv(self, node: TreeNode) -> None:
        if self._write_through:
            self._save_pages(node)

    def on_attach_state(self, node: TreeNode) -> None:
        if self._write_through:
            self._save_state(node)

    def on_evict_kv(self, node: TreeNode) -> None:
        self._save_pages(node)

    def on_evict_state(self, node: TreeNode) -> None:
        self._save_state(node)

    def _save_pages(self, node: TreeNode) -> None:
        self._end_digest(node)
        self._pages.save(node.digests or [], node.slots)

    def _save_state(self, node: TreeNode) -> None:
        if self._states is not None:
            slot = np.array([node.state_slot], dtype=np.int64)
            self._states.save([self._end_digest(node)], slot)

    # -- hits

    def extend_match(self, key: bytes, match: MatchResult, limit: int | None) -> MatchResult:
        """``match`` with ``host_len``: how far these tiers could extend it. Changes nothing."""
        num_tokens = len(key) // TOKEN_BYTES
        end = self._tree.page_floor(num_tokens if limit is None else max(0, min(limit, num_tokens)))
        above = match.node
        if above.parent is not None and match.cached_len < above.end:
            above = above.parent
        best, pos = match.cached_len, above.end
        chain = self._chain(self._end_digest(above), key[: end * TOKEN_BYTES], pos * TOKEN_BYTES)
        for digest in chain:
            pos += self._tree.page_size
            if pos > match.kv_matched_len and digest not in self._pages:
                break
            if self._states is None or digest in self._states:
                best = max(best, pos)
        return replace(match, host_len=best) if best > match.cached_len else match

    def fetch(self, key: bytes, start: int, match: MatchResult) -> HostHit | None:
        """Secure the rows of a hit: pin what is in host memory, read and verify what is in files.

        ``start``: tokens whose KV is on the device. A damaged file shortens the hit or makes it None.
        The caller passes the hit to ``load`` or ``cancel``.
        """
        while match.host_len > match.cached_len:
            digests = list(self._chain(self._root_digest, key[: match.host_len * TOKEN_BYTES], 0))
            hit = self._secure(digests, start // self._tree.page_size, match.host_len)
            if hit is not None:
                return hit
            match = self.extend_match(key, replace(match, host_len=0), match.host_len)
        return None

    def _secure(self, digests: list[bytes], first_page: int, length: int) -> HostHit | None:
        pages = self._pages.secure(digests[first_page:])
        if pages is None or self._states is None:
            return None if pages is None else HostHit(length, pages, None)
        state = self._states.secure(digests[-1:])
        if state is None:
            self._pages.let_go(pages)
            return None
        return HostHit(length, pages, state)

    def load(self, hit: HostHit, slots: np.ndarray, state_slot: int) -> None:
        """Copy a hit into device pages ``slots`` and state slot ``state_slot``; ends the hit.

        Ordered before later work on the stream that the model runs on.
        """
        if len(slots) != len(hit.pages.digests) * self._tree.page_size:
            raise IntegrityError(f"{len(slots)} slots for {len(hit.pages.digests)} pages")
        self._pages.load(hit.pages, slots)
        if self._states is not None and hit.state is not None:
            self._states.load(hit.state, np.array([state_slot], dtype=np.int64))
        self.loads_ct += 1
        self.loaded_tokens_ct += len(slots)
        self.cancel(hit)

    def cancel(self, hit: HostHit) -> None:
        """Give up a hit's claim on the tiers."""
        self._pages.let_go(hit.pages)
        if self._states is not None and hit.state is not None:
            self._states.let_go(hit.state)

    # -- everything at once

    def _tiers(self) -> list[Tier]:
        return [tier for tier in (self._pages, self._states) if tier is not None]

    def stats(self) -> dict[str, int]:
        """Items held and tokens brought back."""
        states = self._states.store if self._states is not None else None
        return {
            "host_pages": len(self._pages.store),
            "host_pages_total": self._pages.store.capacity,
            "host_states": len(states) if states is not None else 0,
            "host_states_total": states.capacity if states is not None else 0,
            "file_pages": self._pages.num_files,
            "file_states": self._states.num_files if self._states is not None else 0,
            "loads_ct": self.loads_ct,
            "loaded_tokens_ct": self.loaded_tokens_ct,
        }

    def wait(self) -> None:
        """Wait until every copy and every file is written."""
        for tier in self._tiers():
            tier.wait()

    def clear(self) -> None:
        """Forget everything, files included."""
        for tier in self._tiers():
            tier.clear()

    def close(self) -> None:
        """Finish all writing, for an orderly end."""
        for tier in self._tiers():
            tier.close()

    def check_integrity(self) -> None:
        """Raise IntegrityError when the host stores' books do not balance."""
        for tier in self._tiers():
            tier.store.check_integrity()


def fingerprint_of(settings: dict[str, object], weight_files: list[Path]) -> bytes:
    """16 bytes that change with the settings or with the weights.

    Weights are sampled: size and sixteen pieces of 64 KiB spread over every file, because a
    fine-tuned model differs nearly everywhere while its files keep names and sizes.
    """
    digest = blake2b(digest_size=DIGEST_BYTES)
    for name in sorted(settings):
        digest.update(f"{name}={settings[name]!r}\n".encode())
    for path in sorted(weight_files):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}\n".encode())
        with path.open("rb") as file:
            for i in range(16):
                file.seek(size * i // 16)
                digest.update(file.read(1 << 16))
    return digest.digest()
