"""Looks at a running server at fixed times."""

from __future__ import annotations

import asyncio
import contextlib
import time
from types import TracebackType
from typing import Any

import aiohttp

_FIELDS = (
    "num_running_reqs",
    "num_waiting_reqs",
    "num_used_tokens",
    "token_usage",
    "gen_throughput",
)


class LoadSampler:
    """Asks /v1/loads every ``period_s`` seconds between entering and leaving.

    samples  one object a look: seconds since entering, and the server's load. The server's figures
             are those of its last step that sent tokens. Looks that failed are left out.
    """

    def __init__(self, url: str, *, period_s: float = 0.5) -> None:
        self._url = url + "/v1/loads"
        self._period_s = period_s
        self._task: asyncio.Task[None] | None = None
        self.samples: list[dict[str, Any]] = []

    async def __aenter__(self) -> LoadSampler:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _watch(self) -> None:
        start = time.perf_counter()
        looks = 0
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            while True:
                sample = await self._look(session)
                if sample is not None:
                    self.samples.append({"t_s": round(time.perf_counter() - start, 3), **sample})
                looks += 1
                wait = start + looks * self._period_s - time.perf_counter()
                await asyncio.sleep(max(0.0, wait))

    async def _look(self, session: aiohttp.ClientSession) -> dict[str, Any] | None:
        try:
            async with session.get(self._url) as reply:
                loads = (await reply.json())["loads"]
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError):
            return None
        summed: dict[str, Any] = {name: sum(load[name] for load in loads) for name in _FIELDS}
        summed["token_usage"] /= max(1, len(loads))
        return summed

    def peak(self, name: str) -> int:
        """Largest value seen of a field; 0 if nothing was seen."""
        return int(max((sample[name] for sample in self.samples), default=0))
