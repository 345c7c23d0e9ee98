"""Everything between a caller and the scheduler process, with or without HTTP."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from sglang.bundled import resolve_model_path
from sglang.srt.entrypoints.placement import place
from sglang.srt.entrypoints.replicas import ReplicaClient
from sglang.srt.entrypoints.scheduler_client import SCHEDULER_MODULE, SchedulerClient
from sglang.srt.managers.errors import RequestError, unavailable
from sglang.srt.managers.front_end_config import load_tokenizer, make_front_end_config
from sglang.srt.managers.io_struct import (
    FlushCacheReqInput,
    FlushCacheReqOutput,
    FromScheduler,
    GetInternalStateReq,
    GetInternalStateReqOutput,
    HealthCheckReq,
    ReadyOutput,
    SchedulerStats,
)
from sglang.srt.managers.request_state import GenerateReqInput
from sglang.srt.managers.template import ChatTemplate, load_chat_template
from sglang.srt.managers.tokenizer import NoTokenizer, Tokenizer
from sglang.srt.managers.tokenizer_manager import TokenizerManager, new_rid
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.version import __version__

logger = logging.getLogger(__name__)

HEALTH_TIMEOUT_SECONDS = 20.0
"""An idle scheduler that was silent for this long is not healthy."""
BUSY_HEALTH_TIMEOUT_SECONDS = 60.0
"""The same while requests run: one step may compile a kernel, or be long."""
_HEARTBEAT_SECONDS = 2.0
_CALL_TIMEOUT_SECONDS = 60.0


class FrontEnd:
    """Tokenizer, template, request table and the scheduler process of one server.

    Construct anywhere (it only reads files); `start` and everything after belongs to one event
    loop. `died` says why the scheduler ended, None while it is fine.
    Raises: ValueError or FileNotFoundError if model, tokenizer or template cannot be read.
    """

    def __init__(
        self, server_args: ServerArgs, *, scheduler_module: str = SCHEDULER_MODULE
    ) -> None:
        self.server_args = server_args
        self.tokenizer: Tokenizer | NoTokenizer = load_tokenizer(server_args)
        self.config = make_front_end_config(server_args, self.tokenizer)
        self.template: ChatTemplate | None = None
        if isinstance(self.tokenizer, Tokenizer):
            self.template = load_chat_template(self.tokenizer, override=server_args.chat_template)
        self.client = self._new_client(scheduler_module)
        self.manager = TokenizerManager(self.config, self.tokenizer, self.client)
        self.died: str | None = None
        self.draining = False
        self._ended = asyncio.Event()
        self._ready = asyncio.Event()
        self._warm = asyncio.Event()
        if server_args.skip_server_warmup:
            self._warm.set()
        self._heartbeat: asyncio.Task[None] | None = None

    def _new_client(self, module: str) -> SchedulerClient | ReplicaClient:
        if self.server_args.dp_size == 1:
            return SchedulerClient(
                module=module, on_message=self._on_message, on_death=self._on_death
            )
        return ReplicaClient(
            self.server_args.dp_size,
            module=module,
            on_message=self._on_message,
            on_death=self._on_death,
        )

    # --- life -----------------------------------------------------------------------------

    def start(self) -> None:
        """Start the scheduler process; `wait_ready` says when it can work."""
        if isinstance(self.client, ReplicaClient):
            self.client.start(self.server_args.to_dict())
        else:
            own, environment = place(self.server_args.to_dict(), 0, 1)
            self.client.start(own, environment=environment)
        self._heartbeat = asyncio.get_running_loop().create_task(self._beat())

    async def wait_ready(self) -> None:
        """Wait until the model is loaded. Raises: RuntimeError if the scheduler died instead."""
        waits = [asyncio.ensure_future(event.wait()) for event in (self._ready, self._ended)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self.died is not None:
            raise RuntimeError(self.died)

    async def wait_death(self) -> str:
        """Wait until the scheduler has ended unasked; return why."""
        await self._ended.wait()
        return self.died or ""

    async def shutdown(self) -> None:
        """End requests and scheduler. Idempotent."""
        self.manager.fail_all(unavailable("the server is shutting down"))
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        if self._ready.is_set():
            await self.client.shutdown()
        else:
            self.client.kill()

    def drain(self) -> None:
        """Refuse new requests; running ones go on."""
        self.draining = True
        if self.died is None:
            self.manager.refusal = unavailable("the server is shutting down", code="draining")

    def unhealthy_reason(self) -> str | None:
        """Why the server cannot answer now; None if it can."""
        if self.died is not None:
            return self.died
        if self.draining:
            return "the server is shutting down"
        if not self._ready.is_set():
            return "the model is still loading"
        if not self._warm.is_set():
            return "the model is warming up"
        silent_s = self._silent_s()
        busy_limit_s = min(BUSY_HEALTH_TIMEOUT_SECONDS, self.server_args.watchdog_timeout)
        if silent_s > (busy_limit_s if self.manager.num_running else HEALTH_TIMEOUT_SECONDS):
            return f"the scheduler has been silent for {silent_s:.0f} s"
        return None

    def _on_message(self, message: FromScheduler) -> None:
        self.manager.handle(message)
        if isinstance(message, ReadyOutput):
            self._ready.set()
            if self.draining:
                self.drain()

    def _on_death(self, why: str) -> None:
        logger.error("%s", why)
        self.died = why
        self.manager.fail_all(RequestError(why, status=503, code="scheduler_died"))
        self._ended.set()

    async def _beat(self) -> None:
        """Ask for a sign of life now and then, so that silence means something; end a scheduler
        that has been silent for too long, because its requests will never end."""
        await self._ready.wait()
        limit_s = self.server_args.watchdog_timeout
        while self.died is None:
            self.client.send(HealthCheckReq("heartbeat"))
            await asyncio.sleep(_HEARTBEAT_SECONDS)
            if self._silent_s() > limit_s:
                self.client.end(f"it gave no sign of life for --watchdog-timeout {limit_s:g} s")

    def _silent_s(self) -> float:
        return time.monotonic() - self.client.last_seen

    # --- one token ------------------------------------------------------------------------

    async def generate_one_token(self) -> None:
        """Run a one-token request. Raises: RequestError if it does not end well."""
        rid = f"health-{new_rid()}"
        params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
        probe = GenerateReqInput(rid, params, input_ids=[0], is_probe=True)
        with await self.manager.start(rid, [probe]) as group:
            await group.finish()

    async def warm_up(self) -> None:
        """Answer one request, so that the first user does not wait for what runs only once."""
        await self.generate_one_token()
        self._warm.set()

    # --- questions to the scheduler -------------------------------------------------------

    async def flush_cache(self) -> FlushCacheReqOutput:
        """Empty the prefix cache. Raises: RequestError 503 without an answer."""
        return await self.manager.call(FlushCacheReqInput, timeout_s=_CALL_TIMEOUT_SECONDS)

    async def server_info(self) -> dict[str, Any]:
        """Arguments, effective sizes and the scheduler's present figures."""
        reply: GetInternalStateReqOutput = await self.manager.call(
            GetInternalStateReq, timeout_s=_CALL_TIMEOUT_SECONDS
        )
        stats = self.manager.stats
        usual = {
            "avg_spec_accept_length": stats.spec_accept_length,
            "last_gen_throughput": stats.gen_throughput,
        }
        states = [{**usual, **state} for state in reply.state.get("replicas", [reply.state])]
        hidden = {"api_key", "admin_api_key"}
        args = {k: v for k, v in self.server_args.to_dict().items() if k not in hidden}
        return {
            **args,
            **self.manager.info,
            "served_model_name": self.config.served_model_name,
            "version": __version__,
            "status": "ready" if self.unhealthy_reason() is None else "unavailable",
            "internal_states": states,
        }

    @property
    def max_model_len(self) -> int:
        """Positions of the longest request: what the scheduler says once it is ready."""
        return int(self.manager.info.get("context_length", self.config.context_length))

    def model_info(self) -> dict[str, Any]:
        """What the model is and how it is called; the tokenizer as a folder that clients can load."""
        return {
            "model_path": self.config.model_path,
            "tokenizer_path": resolve_model_path(self.config.tokenizer_path),
            "served_model_name": self.config.served_model_name,
            "is_generation": True,
            "preferred_sampling_params": self.config.sampling_defaults or None,
            "max_model_len": self.max_model_len,
            "vocab_size": self.config.vocab_size,
        }

    def loads(self) -> list[dict[str, Any]]:
        """The figures that routers balance by, of each replica."""
        client, info = self.client, self.manager.info
        ranks = client.stats if isinstance(client, ReplicaClient) else [self.manager.stats]
        return [self._load(rank, stats, len(ranks), info) for rank, stats in enumerate(ranks)]

    @staticmethod
    def _load(
        rank: int, stats: SchedulerStats, num_ranks: int, info: dict[str, Any]
    ) -> dict[str, Any]:
        waiting = stats.num_queue_reqs
        return {
            "dp_rank": rank,
            "num_running_reqs": stats.num_running_reqs,
            "num_waiting_reqs": waiting,
            "num_total_reqs": stats.num_running_reqs + waiting,
            "num_used_tokens": stats.num_used_tokens,
            "max_total_num_tokens": info.get("max_total_num_tokens", 0) // num_ranks,
            "token_usage": stats.token_usage,
            "gen_throughput": stats.gen_throughput,
            "cache_hit_rate": stats.cache_hit_rate,
            "max_running_requests": info.get("max_running_requests", 0) // num_ranks,
        }
