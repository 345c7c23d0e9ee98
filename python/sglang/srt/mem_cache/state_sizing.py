"""How many state slots and verify rows a memory budget buys. Arithmetic on bytes alone; no torch.

Three branches, first match: the slots are given; there is no prefix cache and the running requests are
given; or state and KV share the budget in a fixed ratio and slots and verify rows are solved jointly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

GIB = 1 << 30
DEFAULT_MAMBA_SHARE = 0.9
"""``--mamba-full-memory-ratio`` where nobody gives it: bytes of state pool per byte of KV."""

BASE_SLOTS_PER_REQUEST = 3
"""Working slot, the locked state of the matched prefix, and the state handed to the prefix tree."""


def slots_per_request(
    *,
    radix_cache: bool,
    extra_buffer: bool,
    lazy: bool,
    overlap: bool,
    skip_decode_lock: bool,
) -> int:
    """State slots that one running request needs at its peak.

    >>> slots_per_request(radix_cache=True, extra_buffer=True, lazy=False, overlap=True,
    ...                   skip_decode_lock=False)
    5
    """
    if not radix_cache:
        return 1
    base = BASE_SLOTS_PER_REQUEST - int(skip_decode_lock)
    if extra_buffer:
        return base + (2 if overlap and not lazy else 1)
    return base + int(skip_decode_lock)


@dataclass(frozen=True)
class StateCosts:
    """Byte prices on the fullest rank.

    ``slot`` and ``extra`` are paid for every state slot, the padding slot included; ``row`` for every
    verify row (0: nothing is recorded); ``fixed`` once. ``ratio`` is the slots per running request.
    """

    slot: int
    row: int
    ratio: int
    extra: int = 0
    fixed: int = 0

    @property
    def has_scratch(self) -> bool:
        return self.row > 0


@dataclass(frozen=True)
class StateRequest:
    """What the operator asked for; None leaves it to the budget.

    ``running_is_default`` says that nobody asked for that many running requests: it caps verify rows
    but does not choose the second branch. ``slot_limit`` bounds the third.
    """

    max_mamba_cache_size: int | None
    max_running_requests: int | None
    radix_cache: bool
    full_memory_ratio: float
    attn_dp_size: int = 1
    slot_limit: int | None = None
    running_is_default: bool = False


@dataclass(frozen=True)
class StateSizing:
    """``slots`` usable slots, ``rows`` verify rows with the discard row, ``charged`` bytes of both."""

    slots: int
    rows: int
    charged: int
    branch: int


def charge(costs: StateCosts, request: StateRequest, slots: int, branch: int) -> StateSizing:
    """Price of ``slots`` slots and the verify rows that go with them."""
    rows = slots
    if branch != 2:
        rows = slots // costs.ratio
        if request.max_running_requests is not None:
            rows = min(request.max_running_requests // request.attn_dp_size, rows)
    rows = rows + 1 if costs.has_scratch else 0
    charged = rows * costs.row + (slots + 1) * (costs.slot + costs.extra) + costs.fixed
    return StateSizing(slots=slots, rows=rows, charged=charged, branch=branch)


def solve(costs: StateCosts, request: StateRequest, rest_bytes: float) -> StateSizing:
    """Size the state pool out of ``rest_bytes``; the result may cost more, or hold no slot.

    In the third branch ``B = rest * f / (1 + f)`` pays for K slots, the padding slot, and K / ratio
    verify rows with the discard row: ``(K + 1) * P + (K / r + 1) * I = B``.
    """
    if request.max_mamba_cache_size is not None:
        slots = request.max_mamba_cache_size // request.attn_dp_size
        return charge(costs, request, slots, 1)
    running_given = request.max_running_requests is not None and not request.running_is_default
    if not request.radix_cache and running_given:
        slots = request.max_running_requests // request.attn_dp_size
        return charge(costs, request, slots, 2)
    slots = _joint_slots(costs, request, rest_bytes)
    return charge(costs, request, slots, 3)


def _joint_slots(costs: StateCosts, request: StateRequest, rest_bytes: float) -> int:
    ratio = request.full_memory_ratio
    budget = rest_bytes * ratio / (1 + ratio)
    per_slot = costs.slot + costs.extra
    if costs.has_scratch:
        slots = (budget - costs.slot - costs.row - costs.extra) // (
            costs.slot + costs.row / costs.ratio + costs.extra
        )
    else:
        slots = (budget - costs.fixed - per_slot) // per_slot
    slots = int(slots)
    return slots if request.slot_limit is None else min(slots, request.slot_limit)


@dataclass(frozen=True)
class Division:
    """A budget divided: the state pool, and ``kv_bytes`` for everything counted per token."""

    state: StateSizing
    kv_bytes: int


def divide(costs: StateCosts, request: StateRequest, rest_bytes: int) -> Division:
    """Divide ``rest_bytes`` between state and KV so that a larger budget never gives less KV.

    Slots are whole, so right after the solution gains a slot the KV share would fall back by up to
    the price of one. There the division of a slightly smaller budget is used, which leaves a part of
    a slot unspent. Budgets too small for one request's slots are outside that promise, and
    ``kv_bytes`` is negative when the state pool alone exceeds the budget.
    """
    state = solve(costs, request, rest_bytes)
    best = Division(state, rest_bytes - state.charged)
    if state.branch != 3:
        return best
    fewest = max(costs.ratio, state.slots - 2 * costs.ratio - 1)
    for slots in range(state.slots - 1, fewest - 1, -1):
        smaller = charge(costs, request, slots, 3)
        kv_bytes = min(rest_bytes, _last_budget_of(costs, request, slots)) - smaller.charged
        if kv_bytes > best.kv_bytes:
            best = Division(smaller, kv_bytes)
    return best


def _last_budget_of(costs: StateCosts, request: StateRequest, slots: int) -> int:
    """Largest whole budget whose joint solution still has ``slots`` slots."""
    ratio = request.full_memory_ratio
    if costs.has_scratch:
        per_slot = costs.slot + costs.row / costs.ratio + costs.extra
        share = (slots + 1) * per_slot + costs.slot + costs.row + costs.extra
    else:
        share = (slots + 2) * (costs.slot + costs.extra) + costs.fixed
    budget = int(share * (1 + ratio) / ratio)
    while _joint_slots(costs, request, budget) > slots:
        budget -= 1
    return budget


def divide_lossless(
    costs: StateCosts, snapshot_row: int, request: StateRequest, rest_bytes: int
) -> Division:
    """``divide`` for update tuples: never less KV than snapshots of ``snapshot_row`` bytes leave.

    The joint solution spends freed scratch on slots first. Where that would leave less KV than the
    default has, slots are given back until it does not.
    """
    lossless = divide(costs, request, rest_bytes)
    default = divide(replace(costs, row=snapshot_row), request, rest_bytes)
    comparable = costs.row <= snapshot_row and default.state.slots >= costs.ratio
    if lossless.kv_bytes >= default.kv_bytes or not comparable:
        return lossless
    low, high = default.state.slots, lossless.state.slots
    while low < high:
        middle = (low + high + 1) // 2
        if rest_bytes - charge(costs, request, middle, 3).charged >= default.kv_bytes:
            low = middle
        else:
            high = middle - 1
    return Division(charge(costs, request, low, 3), default.kv_bytes)
