"""Asks servers and times their answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from sglang.benchmark.options import BenchError, ServingOptions
from sglang.benchmark.prompts import Prompt

_NATIVE_FIELDS = frozenset(
    {
        "rid",
        "return_logprob",
        "logprob_start_len",
        "top_logprobs_num",
        "token_ids_logprob",
        "return_text_in_logprobs",
        "return_state_digest",
        "return_step_lengths",
        "priority",
        "model",
        "stream",
        "lora_path",
    }
)
"""Fields of /generate; everything else in --extra-request-body is a sampling parameter."""


@dataclass
class Outcome:
    """What one request got. Times in seconds; ``start_s`` is on the monotonic clock.

    itls_s      time between tokens: a later chunk of n tokens counts n times, each an n-th of its wait
    arrivals    (time since start, tokens) of each chunk
    """

    prompt_len: int
    output_len: int = 0
    text: str = ""
    error: str = ""
    start_s: float = 0.0
    latency_s: float = 0.0
    ttft_s: float = 0.0
    itls_s: list[float] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)

    @property
    def success(self) -> bool:
        return not self.error

    def add(self, num_new: int) -> None:
        """Note that ``num_new`` tokens have just arrived."""
        now = time.perf_counter() - self.start_s
        if not self.arrivals:
            self.ttft_s = now
        else:
            self.itls_s += [(now - self.arrivals[-1][0]) / num_new] * num_new
        self.arrivals.append((now, num_new))


class ServerClient:
    """One server, asked over one connection pool; use as an asynchronous context manager."""

    def __init__(self, options: ServingOptions, model: str | None = None) -> None:
        self._options = options
        self._kind = options.kind
        self.model = model
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> ServerClient:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self._options.request_timeout_sec),
            headers=self._options.headers,
            read_bufsize=1 << 20,
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        assert self._session is not None, "enter the client first"
        return self._session

    # --- questions ------------------------------------------------------------------------

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait for an answer of /v1/models. Raises: BenchError if none comes in time."""
        end = time.monotonic() + timeout_s
        url = self._options.base_url
        while True:
            try:
                status, _ = await self._get("/v1/models")
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                why = f"{type(error).__name__}: {error}"
            else:
                if status in (401, 403):
                    raise BenchError(f"{url} asks for a key ({status}): set OPENAI_API_KEY")
                if status < 500:
                    return
                why = f"status {status}"
            if time.monotonic() >= end:
                raise BenchError(
                    f"no server answers at {url} ({why}); start one, or correct --base-url, --host "
                    "or --port; --ready-check-timeout-sec sets how long to wait"
                )
            await asyncio.sleep(min(0.5, max(0.05, timeout_s / 10)))

    async def first_model(self) -> str | None:
        """Name of the model that the server serves, or None if it does not say."""
        answer = await self.ask("/v1/models")
        models = answer.get("data") if isinstance(answer, dict) else None
        return str(models[0]["id"]) if models else None

    async def ask(self, path: str) -> Any:
        """JSON of a GET; None where there is no such route or no JSON."""
        try:
            status, body = await self._get(path)
            return orjson.loads(body) if status == 200 else None
        except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError):
            return None

    async def _get(self, path: str) -> tuple[int, bytes]:
        timeout = aiohttp.ClientTimeout(total=30)
        async with self.session.get(self._options.base_url + path, timeout=timeout) as reply:
            return reply.status, await reply.read()

    async def flush_cache(self) -> None:
        """Empty the prefix cache; requests that have just ended get a moment to leave.

        Raises: BenchError if the server cannot or will not.
        """
        url, why = self._options.base_url + "/flush_cache", ""
        for _ in range(20):
            try:
                async with self.session.post(url) as reply:
                    if reply.status == 200:
                        return
                    why = f"status {reply.status}: {(await reply.text())[:200]}"
            except aiohttp.ClientError as error:
                why = str(error)
            await asyncio.sleep(0.1)
        raise BenchError(f"--flush-cache: {url} failed ({why}); run without the flag")

    # --- requests -------------------------------------------------------------------------

    async def run(self, prompt: Prompt) -> Outcome:
        """Send one request and time it; a failure is in the outcome's ``error``."""
        outcome = Outcome(prompt.num_tokens, start_s=time.perf_counter())
        url = self._options.base_url + self._kind.path
        try:
            body = orjson.dumps(self.payload(prompt))
            headers = {"Content-Type": "application/json"}
            async with self.session.post(url, data=body, headers=headers) as reply:
                if reply.status != 200:
                    outcome.error = f"status {reply.status}: {(await reply.text())[:500]}"
                elif self._options.disable_stream:
                    self._take_whole(outcome, orjson.loads(await reply.read()))
                else:
                    await self._take_stream(outcome, reply)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError) as error:
            outcome.error = f"{type(error).__name__}: {error}"
        outcome.latency_s = time.perf_counter() - outcome.start_s
        if outcome.success and not outcome.output_len:
            outcome.error = "the server ended the answer without a token"
        return outcome

    def payload(self, prompt: Prompt) -> dict[str, Any]:
        """Body of a request."""
        options, kind = self._options, self._kind
        stream = not options.disable_stream
        ignore_eos = not options.disable_ignore_eos
        extra = options.extra_request_body
        if kind.route == "native":
            sampling: dict[str, Any] = {
                "temperature": 0.0,
                "max_new_tokens": prompt.output_len,
                "ignore_eos": ignore_eos,
            }
            field_name = "text" if isinstance(prompt.content, str) else "input_ids"
            body: dict[str, Any] = {field_name: prompt.content, "stream": stream}
            body |= {key: value for key, value in extra.items() if key in _NATIVE_FIELDS}
            sampling |= {
                key: value
                for key, value in extra.items()
                if key not in _NATIVE_FIELDS and key != "sampling_params"
            }
            return body | {"sampling_params": sampling | extra.get("sampling_params", {})}
        body = {"model": self.model, "temperature": 0.0, "stream": stream}
        if stream:
            body["stream_options"] = {"include_usage": True}
            if kind.extensions:
                body["stream_options"]["continuous_usage_stats"] = True
        if kind.extensions:
            body["ignore_eos"] = ignore_eos
        if kind.route == "completions":
            body |= {"prompt": prompt.content, "max_tokens": prompt.output_len}
        else:
            body |= {
                "messages": [{"role": "user", "content": prompt.content}],
                "max_completion_tokens": prompt.output_len,
            }
        return body | extra

    async def _take_stream(self, outcome: Outcome, reply: aiohttp.ClientResponse) -> None:
        take = self._take_native if self._kind.route == "native" else self._take_openai
        async for event in _events(reply):
            if event == b"[DONE]":
                break
            message = orjson.loads(event)
            if message.get("error"):
                outcome.error = _error_text(message["error"])
                return
            take(outcome, message)

    @staticmethod
    def _take_native(outcome: Outcome, message: dict[str, Any]) -> None:
        """Text and count are cumulative; the count shows tokens that have no text yet."""
        meta = message["meta_info"]
        outcome.text = message.get("text") or ""
        count = int(meta.get("completion_tokens", outcome.output_len + 1))
        if count > outcome.output_len:
            outcome.add(count - outcome.output_len)
            outcome.output_len = count
        reason = meta.get("finish_reason")
        if isinstance(reason, dict) and reason.get("type") == "abort":
            outcome.error = f"aborted: {reason.get('message', '')}"

    @staticmethod
    def _take_openai(outcome: Outcome, message: dict[str, Any]) -> None:
        usage = message.get("usage")
        choices = message.get("choices") or []
        piece = ""
        if choices:
            delta = choices[0].get("delta")
            if delta is None:
                piece = choices[0].get("text") or ""
            else:
                piece = (delta.get("content") or "") + (delta.get("reasoning_content") or "")
        outcome.text += piece
        count = int(usage["completion_tokens"]) if usage else outcome.output_len + bool(piece)
        if choices and count > outcome.output_len:
            outcome.add(count - outcome.output_len)
        outcome.output_len = count if usage else max(count, outcome.output_len)

    def _take_whole(self, outcome: Outcome, message: Any) -> None:
        message = message[0] if isinstance(message, list) else message
        if message.get("error"):
            outcome.error = _error_text(message["error"])
        elif self._kind.route == "native":
            outcome.text = message.get("text") or ""
            outcome.output_len = int(message["meta_info"]["completion_tokens"])
        else:
            choice = message["choices"][0]
            outcome.text = choice.get("text") or choice.get("message", {}).get("content") or ""
            outcome.output_len = int(message["usage"]["completion_tokens"])
        now = time.perf_counter() - outcome.start_s
        outcome.ttft_s = now
        outcome.arrivals = [(now, outcome.output_len)]


async def _events(reply: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Data of server-sent events, of any length."""
    buffer = bytearray()
    async for piece in reply.content.iter_any():
        buffer += piece
        while (end := buffer.find(b"\n")) >= 0:
            line = bytes(buffer[:end])
            del buffer[: end + 1]
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _error_text(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
