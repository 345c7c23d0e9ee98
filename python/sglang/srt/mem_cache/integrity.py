"""The error every owner of slots raises when its books do not balance."""

from __future__ import annotations

from sglang.srt.environ import envs


class IntegrityError(RuntimeError):
    """A slot is lost, held twice, or freed by someone who does not hold it."""


class HostSlotList:
    """Books of one set of slots ``1 .. size``; slot 0 is padding and never handed out.

    Every slot is either in the free list or held; ``what`` names the slots in messages. With
    SGLANG_DEBUG_MEMORY_POOL the books are checked after every change.
    """

    def __init__(self, size: int, what: str) -> None:
        if size < 1:
            raise ValueError(f"need at least one {what}, got {size}")
        self.size = size
        self._what = what
        self.clear()

    def clear(self) -> None:
        """Take every slot back."""
        self._free = list(range(self.size, 0, -1))
        self._held = bytearray(self.size + 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """Hand out ``count`` slots, or None (nothing changes) when too few are free."""
        if count < 0:
            raise ValueError(f"cannot allocate {count} of {self._what}")
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        for slot in taken:
            self._held[slot] = 1
        self._check_if_debugging()
        return taken

    def give(self, slots: list[int]) -> None:
        """Take ``slots`` back; all or nothing. Raises IntegrityError naming a slot not held."""
        if len(set(slots)) != len(slots):
            raise IntegrityError(f"{self._what} freed twice in one call: {sorted(slots)}")
        for slot in slots:
            if not 1 <= slot <= self.size or not self._held[slot]:
                raise IntegrityError(f"{self._what} {slot} is freed but not held (double free?)")
        for slot in slots:
            self._held[slot] = 0
        self._free.extend(slots)
        self._check_if_debugging()

    def _check_if_debugging(self) -> None:
        if envs.SGLANG_DEBUG_MEMORY_POOL.get():
            self.check()

    def is_held(self, slot: int) -> bool:
        """True when ``slot`` is handed out."""
        return 1 <= slot <= self.size and bool(self._held[slot])

    def check(self) -> None:
        """Raise IntegrityError unless free + held == total and nothing is listed twice."""
        if len(set(self._free)) != len(self._free):
            raise IntegrityError(f"a {self._what} is twice in the free list")
        if any(not 1 <= slot <= self.size or self._held[slot] for slot in self._free):
            raise IntegrityError(f"the free list holds a {self._what} that is held or out of range")
        num_held = sum(self._held)
        if len(self._free) + num_held != self.size:
            raise IntegrityError(
                f"{self._what}: {len(self._free)} free + {num_held} held != {self.size} in all"
            )
