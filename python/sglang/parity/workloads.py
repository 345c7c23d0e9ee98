"""What is run: single prompts, conversations that resume from a tracked state, and a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sglang.parity.client import Client, Completion

PROMPTS = (
    "The ship had been at sea for eleven weeks when the lookout",
    "To install the package, first make sure that",
    "My dear sister, I write to you in some haste, because",
    "The function returns a list of",
    "In the beginning of the year the king",
    "Question: what is the difference between a table and a view?\nAnswer:",
    "It is a truth which every traveller learns, that",
    "The committee met again on Monday. Its members",
)
FOLLOW_UP = "\n\nAnd what happened after that? Tell me again, from the"


@dataclass(frozen=True)
class Sizes:
    """How much each workload generates; ``short`` is for tests.

    single_tokens   output tokens of each single and batched prompt
    turn_tokens     prompt and output tokens of a conversation's first turn, together
    follow_tokens   output tokens of its second turn
    """

    num_prompts: int = 8
    single_tokens: int = 300
    num_conversations: int = 4
    turn_tokens: int = 700
    follow_tokens: int = 120

    @staticmethod
    def short() -> Sizes:
        return Sizes(
            num_prompts=2, single_tokens=40, num_conversations=1, turn_tokens=560, follow_tokens=24
        )


@dataclass
class Outcome:
    """Completions of one run of one workload, in a fixed order; ``group`` names their column."""

    completions: list[Completion] = field(default_factory=list)
    group: list[str] = field(default_factory=list)

    def add(self, group: str, completion: Completion) -> None:
        self.group.append(group)
        self.completions.append(completion)


def run_single(client: Client, sizes: Sizes) -> Outcome:
    """Prompts one after the other."""
    outcome = Outcome()
    for prompt in PROMPTS[: sizes.num_prompts]:
        outcome.add("single", client.complete(prompt, sizes.single_tokens))
    return outcome


def run_multi_turn(client: Client, sizes: Sizes) -> Outcome:
    """A long first turn that crosses track boundaries, then a turn that resumes from the cache."""
    outcome = Outcome()
    for prompt in PROMPTS[: sizes.num_conversations]:
        first = client.complete(prompt, max(1, sizes.turn_tokens - client.count(prompt)))
        outcome.add("turn 1", first)
        outcome.add("turn 2", client.follow(first, FOLLOW_UP, sizes.follow_tokens))
    return outcome


def run_batched(client: Client, sizes: Sizes) -> Outcome:
    """All prompts at once."""
    outcome = Outcome()
    prompts = PROMPTS[: sizes.num_prompts]
    for completion in client.complete_batch(prompts, sizes.single_tokens):
        outcome.add("batched", completion)
    return outcome


WORKLOADS: dict[str, Callable[[Client, Sizes], Outcome]] = {
    "single": run_single,
    "multi-turn": run_multi_turn,
    "batched": run_batched,
}
