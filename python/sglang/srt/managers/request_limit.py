"""How long a request may be, and what to say of one that is longer. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RequestLimit:
    """Prompt and output tokens of the largest request, and what bounds them.

    tokens                what the engine serves: the context, or less where the KV pool is smaller
    context_length        --context-length, resolved
    model_context_length  positions that the model was made for; as much as the flag can be raised to
    """

    tokens: int
    context_length: int
    model_context_length: int

    @property
    def longest_prompt(self) -> int:
        """Prompt tokens that leave room for one output token."""
        return self.tokens - 1

    def refusal(self, field: str, how_many: str) -> str:
        """Why a prompt of ``how_many`` tokens in ``field`` is refused, and the ways out."""
        if self.tokens < self.context_length:
            bound = (
                f"the KV cache holds {self.tokens} of one request, below --context-length "
                f"{self.context_length}"
            )
            ways = ["a larger --max-total-tokens", "a larger --mem-fraction-static"]
        else:
            bound = f"--context-length {self.context_length} is for prompt and answer together"
            raisable = self.context_length < self.model_context_length
            ways = ["a larger --context-length"] if raisable else []
        ways.append("--allow-auto-truncate")
        return (
            f"{field} has {how_many} tokens; {bound}, so the longest prompt has "
            f"{self.longest_prompt}: shorten it, or start the server with {' or '.join(ways)}"
        )
