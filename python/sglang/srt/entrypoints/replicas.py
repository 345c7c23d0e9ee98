"""Several scheduler processes behind one front end: each request goes to the least loaded one."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec

from sglang.srt.entrypoints.placement import place
from sglang.srt.entrypoints.scheduler_client import SCHEDULER_MODULE, SchedulerClient
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenIDOutput,
    FlushCacheReqOutput,
    FromScheduler,
    GetInternalStateReqOutput,
    HealthCheckOutput,
    ReadyOutput,
    SchedulerStats,
    TokenizedGenerateReqInput,
    ToScheduler,
)

_MEANS = ("token_usage", "mamba_usage", "cache_hit_rate", "spec_accept_length", "spec_accept_rate")
"""Figures of SchedulerStats that are averaged over replicas; all others add up."""


@dataclasses.dataclass
class _Replica:
    rank: int
    client: SchedulerClient
    num_requests: int = 0
    stats: SchedulerStats = dataclasses.field(default_factory=SchedulerStats)


class ReplicaClient:
    """Looks like one SchedulerClient. A replica that dies ends the server, as a single one does.

    A request goes to the replica with the fewest unfinished ones, to the first of equals, so that
    the turns of a lonely conversation find their prefix again.
    """

    def __init__(
        self,
        count: int,
        *,
        module: str = SCHEDULER_MODULE,
        on_message: Callable[[FromScheduler], None],
        on_death: Callable[[str], None],
    ) -> None:
        self._on_message = on_message
        self._on_death = on_death
        self._replicas = [self._new_replica(at, module) for at in range(count)]
        self._owner: dict[str, _Replica] = {}
        self._infos: list[dict[str, Any]] = []
        self._answers: dict[str, dict[int, Any]] = {}
        self._has_died = False

    def _new_replica(self, at: int, module: str) -> _Replica:
        client = SchedulerClient(
            module=module,
            on_message=lambda message: self._receive(self._replicas[at], message),
            on_death=lambda why: self._died(f"replica {at}: {why}"),
        )
        return _Replica(at, client)

    @property
    def stats(self) -> list[SchedulerStats]:
        """The latest figures of each replica."""
        return [replica.stats for replica in self._replicas]

    @property
    def last_seen(self) -> float:
        """When the replica that has been silent longest last said something."""
        return min(replica.client.last_seen for replica in self._replicas)

    def start(self, server_args: dict[str, Any]) -> None:
        """Start all; each gets its share of the host, or a GPU of its own. Raises: OSError."""
        for at, replica in enumerate(self._replicas):
            own, environment = place(server_args, at, len(self._replicas))
            replica.client.start(own, environment=environment)

    def send(self, message: ToScheduler) -> None:
        """Give the message to those it concerns; never blocks."""
        if isinstance(message, TokenizedGenerateReqInput):
            replica = min(self._replicas, key=lambda each: each.num_requests)
            replica.num_requests += 1
            self._owner[message.rid] = replica
            replica.client.send(message)
        elif isinstance(message, AbortReq) and not message.abort_all:
            owner = self._owner.get(message.rid)
            if owner is not None:
                owner.client.send(message)
        else:
            for replica in self._replicas:
                replica.client.send(message)

    def _receive(self, replica: _Replica, message: FromScheduler) -> None:
        if isinstance(message, BatchTokenIDOutput):
            for item in message.items:
                if item.finish_reason is not None and self._owner.pop(item.rid, None) is not None:
                    replica.num_requests -= 1
            if message.stats is not None:
                replica.stats = message.stats
                message.stats = _sum_up(self.stats)
        elif isinstance(message, ReadyOutput):
            self._infos.append(message.info)
            if len(self._infos) < len(self._replicas):
                return
            message = ReadyOutput(_joined(self._infos))
        elif isinstance(
            message, FlushCacheReqOutput | GetInternalStateReqOutput | HealthCheckOutput
        ):
            answers = self._answers.setdefault(message.req_id, {})
            answers[replica.rank] = message
            if len(answers) < len(self._replicas):
                return
            del self._answers[message.req_id]
            message = _merged([answers[rank] for rank in sorted(answers)])
        self._on_message(message)

    def _died(self, why: str) -> None:
        if not self._has_died:
            self._has_died = True
            self._on_death(why)

    async def shutdown(self, *, timeout_s: float = 5.0) -> None:
        """Ask all to leave, kill those that do not. Idempotent."""
        self._has_died = True
        await asyncio.gather(*(r.client.shutdown(timeout_s=timeout_s) for r in self._replicas))

    def end(self, why: str) -> None:
        """Kill the replica that has been silent longest."""
        min(self._replicas, key=lambda each: each.client.last_seen).client.end(why)

    def kill(self) -> None:
        """End all at once."""
        for replica in self._replicas:
            replica.client.kill()


def _sum_up(stats: list[SchedulerStats]) -> SchedulerStats:
    total = SchedulerStats()
    for name in SchedulerStats.__struct_fields__:
        values = [getattr(each, name) for each in stats]
        if name in _MEANS:
            known = [value for value in values if value] or [0.0]
            setattr(total, name, sum(known) / len(known))
        else:
            setattr(total, name, sum(values))
    return total


def _joined(infos: list[dict[str, Any]]) -> dict[str, Any]:
    """Sizes of one replica, and of all where they add up."""
    info = dict(infos[0])
    for name in ("max_total_num_tokens", "max_running_requests"):
        info[name] = sum(each[name] for each in infos)
    for name in ("max_req_input_len", "context_length"):
        info[name] = min(each[name] for each in infos)
    return info


def _merged(answers: list[Any]) -> FromScheduler:
    first = answers[0]
    if isinstance(first, GetInternalStateReqOutput):
        return GetInternalStateReqOutput(
            first.req_id, {"replicas": [answer.state for answer in answers]}
        )
    if isinstance(first, FlushCacheReqOutput):
        failed = [answer for answer in answers if not answer.success]
        return msgspec.structs.replace(failed[0] if failed else first)
    return first
