"""Sends prompts at a rate and under a limit of requests in flight."""

from __future__ import annotations

import asyncio
import math
import random
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tqdm import tqdm

from sglang.benchmark.client import Outcome
from sglang.benchmark.prompts import Prompt

Send = Callable[[Prompt], Awaitable[Outcome]]


@dataclass(frozen=True)
class LoadResult:
    """Outcomes in the order of the prompts, and the time from the first request to the last answer."""

    outcomes: list[Outcome]
    duration_s: float


def arrival_times(count: int, request_rate: float, seed: int) -> list[float]:
    """Seconds after the start at which each request is due; Poisson arrivals, all 0 for inf."""
    if math.isinf(request_rate):
        return [0.0] * count
    rng = random.Random(f"{seed}:arrivals")
    due, times = 0.0, []
    for _ in range(count):
        times.append(due)
        due += rng.expovariate(request_rate)
    return times


async def send_all(
    send: Send,
    prompts: Sequence[Prompt],
    *,
    due_s: Sequence[float],
    max_concurrency: int | None,
    show_progress: bool,
) -> LoadResult:
    """Send every prompt when it is due and a place is free. A request's clock starts as it is sent."""
    places = asyncio.Semaphore(max_concurrency or max(1, len(prompts)))
    bar = tqdm(total=len(prompts), file=sys.stderr, disable=not show_progress, unit="req")
    start = time.perf_counter()

    async def one(prompt: Prompt) -> Outcome:
        async with places:
            outcome = await send(prompt)
        bar.update(1)
        return outcome

    tasks = []
    for prompt, due in zip(prompts, due_s, strict=True):
        wait = start + due - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(one(prompt)))
    try:
        outcomes = list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        bar.close()
    return LoadResult(outcomes, time.perf_counter() - start)
