"""Arguments about scheduling: how many requests, how large the steps are."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.arg_groups.flag import flag


@dataclass
class ScheduleFields:
    """Which requests run, and how much of them in one step."""

    max_running_requests: int | None = flag(
        None,
        "Requests that run at the same time.",
        minimum=1,
        auto="what the pools hold; 48 at most with speculative decoding",
    )
    max_queued_requests: int | None = flag(
        None,
        "Requests that may wait; one more is refused with 503.",
        minimum=1,
        auto="no limit",
    )
    chunked_prefill_size: int | None = flag(
        None,
        "Tokens of a prompt that one step computes at most; -1 computes a prompt in one step.",
        minimum=-1,
        auto="8192 on a GPU, 512 on the CPU",
    )
    max_prefill_tokens: int = flag(
        16384, "Prompt tokens of all requests that one step computes at most.", minimum=1
    )
    schedule_policy: str = flag(
        "fcfs",
        "Which waiting request is next: the oldest (fcfs), or the one with the longest cached "
        "prefix (lpm).",
        choices=("fcfs", "lpm"),
    )
    enable_priority_scheduling: bool = flag(
        False, "Take waiting requests of higher priority first."
    )
    schedule_conservativeness: float = flag(
        1.0,
        "Share of a request's token limit that must be free before it is admitted, as a factor; "
        "larger admits fewer and retracts less often.",
        above=0,
    )
    enable_mixed_chunk: bool = flag(
        False, "Compute prompt chunks and decode steps in the same call of the model."
    )
    disable_overlap_schedule: bool = flag(
        False, "Prepare a step only after the former one has finished on the device."
    )
