"""What a chat answer is made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A tool call begins; calls of one answer count from 0."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of a call's arguments; the pieces together are one JSON object."""

    index: int
    text: str


Event = Content | Reasoning | CallStart | CallArguments


def partial_suffix(text: str, markers: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that could be the start of a marker."""
    longest = max(map(len, markers)) - 1
    for size in range(min(longest, len(text)), 0, -1):
        end = text[-size:]
        if any(marker.startswith(end) for marker in markers):
            return size
    return 0
