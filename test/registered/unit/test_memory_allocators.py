"""KV pages, state slots and request rows: books that must balance."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.integrity import HostSlotList, IntegrityError
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit")


def test_pages_are_whole_ascending_and_never_the_padding_page():
    pages = PagedTokenToKVPoolAllocator(100, 16)
    assert pages.size == pages.available_size() == 96
    slots = pages.alloc(17)
    assert slots.dtype == np.int64 and slots.tolist() == list(range(16, 48))
    assert pages.alloc(0).tolist() == []
    assert pages.available_size() == 64 and pages.held_size() == 32


def test_a_request_too_large_changes_nothing():
    pages = PagedTokenToKVPoolAllocator(64, 16)
    held = pages.alloc(33)
    assert pages.alloc(17) is None
    assert pages.available_size() == 16
    pages.free(held)
    assert pages.alloc(64).size == 64
    pages.check_integrity()


def test_double_free_names_the_slot():
    pages = PagedTokenToKVPoolAllocator(64, 16)
    slots = pages.alloc(32)
    pages.free(slots[16:])
    with pytest.raises(IntegrityError, match="KV slot 32 "):
        pages.free(slots)
    pages.check_integrity()
    assert pages.held_size() == 16, "the page that was held stays held"


@pytest.mark.parametrize("slots", [[0], [15], [80], [-1]], ids=str)
def test_padding_and_foreign_slots_cannot_be_freed(slots):
    pages = PagedTokenToKVPoolAllocator(64, 16)
    with pytest.raises(IntegrityError, match=f"KV slot {slots[0]} "):
        pages.free(np.array(slots))


@pytest.mark.parametrize("bad", [list(range(16, 31)), [16] * 16], ids=["part", "repeated"])
def test_a_part_of_a_page_cannot_be_freed(bad):
    pages = PagedTokenToKVPoolAllocator(64, 16)
    pages.alloc(16)
    with pytest.raises(IntegrityError, match="page 1"):
        pages.free(np.array(bad))
    assert pages.held_size() == 16


def test_check_finds_a_page_that_is_free_and_held():
    """Control: a corrupted free list must be seen."""
    pages = PagedTokenToKVPoolAllocator(64, 16)
    pages.alloc(16)
    pages._free = np.append(pages._free, 1)
    with pytest.raises(IntegrityError):
        pages.check_integrity()
    pages._free = np.array([2, 2, 3])
    with pytest.raises(IntegrityError, match="twice"):
        pages.check_integrity()


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_random_traffic_keeps_the_books(page_size):
    rng = random.Random(page_size)
    pages = PagedTokenToKVPoolAllocator(40 * page_size, page_size)
    held: list[np.ndarray] = []
    for _ in range(400):
        if held and rng.random() < 0.5:
            pages.free(held.pop(rng.randrange(len(held))))
        else:
            slots = pages.alloc(rng.randrange(1, 6 * page_size))
            if slots is not None:
                held.append(slots)
        everything = np.concatenate(held) if held else np.array([], dtype=np.int64)
        assert np.unique(everything).size == everything.size
        assert everything.size + pages.available_size() == pages.size
        pages.check_integrity()


def test_state_slots():
    slots = MambaSlotAllocator(3, "cpu")
    taken = slots.alloc(2)
    assert taken.dtype == torch.int64 and taken.tolist() == [1, 2]
    assert slots.alloc(2) is None and slots.available_size() == 1
    slots.free(taken[:1])
    with pytest.raises(IntegrityError, match="state slot 1 "):
        slots.free(torch.tensor([2, 1]))
    assert slots.is_held(2), "nothing is freed when one slot of the call is not held"
    assert slots.alloc_ids(2) is not None
    slots.check_integrity()
    slots.clear()
    assert slots.available_size() == 3


def test_slots_freed_twice_in_one_call():
    slots = MambaSlotAllocator(3, "cpu")
    slots.alloc(1)
    with pytest.raises(IntegrityError, match="twice in one call"):
        slots.free([1, 1])


def test_check_finds_a_lost_slot():
    """Control: a slot that nobody holds and that is not free must be seen."""
    books = HostSlotList(4, "request row")
    books.take(2)
    books._held[1] = 0
    with pytest.raises(IntegrityError, match="request row"):
        books.check()


@pytest.mark.parametrize("size", [0, -1])
def test_empty_pools_are_refused(size):
    with pytest.raises(ValueError):
        MambaSlotAllocator(size, "cpu")
    with pytest.raises(ValueError, match="holds no page"):
        PagedTokenToKVPoolAllocator(size, 16)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
