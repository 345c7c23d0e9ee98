"""What a request cost, counted the same in streams and whole answers."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.request_state import ReqState


def usage_of(states: list[ReqState], *, n: int) -> dict[str, Any]:
    """Usage of `states`, which hold `n` sequences for each prompt, prompt by prompt.

    A prompt counts once whatever `n` is, and so do its cached tokens (those of its first
    sequence, the only one that can have found nothing of its own siblings).
    """
    firsts = states[::n]
    prompt_tokens = sum(state.prompt_tokens for state in firsts)
    completion_tokens = sum(state.completion_tokens for state in states)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(state.cached_tokens for state in firsts)},
    }
