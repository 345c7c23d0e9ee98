"""The engine from Python, without HTTP: `with sglang.Engine("demo") as engine: ...`."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from sglang.srt.arg_groups.pipeline import run_resolution_pipeline
from sglang.srt.entrypoints.front_end import FrontEnd
from sglang.srt.entrypoints.http_io import decode_body
from sglang.srt.entrypoints.native import GenerateJob, GenerateRequest, NativeServing
from sglang.srt.entrypoints.scheduler_client import SCHEDULER_MODULE
from sglang.srt.managers.errors import RequestError
from sglang.srt.server_args import ServerArgs

T = TypeVar("T")
Prompt = str | list[str]
Reply = dict[str, Any] | list[dict[str, Any]]
_JOIN_SECONDS = 10.0


class Engine:
    """One model in its own scheduler process, called from any thread or event loop.

    The event loop of the front end runs in a thread of its own, so a caller's running loop does
    not matter. Close it with `shutdown()` or `with`; the end of the program closes it too.
    Raises: ValueError for arguments that cannot work; RuntimeError if the model could not start.
    """

    def __init__(
        self,
        model_path: str | None = None,
        *,
        server_args: ServerArgs | None = None,
        scheduler_module: str = SCHEDULER_MODULE,
        **arguments: Any,
    ) -> None:
        if server_args is None:
            if model_path is None:
                raise ValueError("Engine needs a model_path: a checkpoint's directory, or demo")
            server_args = ServerArgs(model_path=model_path, **arguments)
        elif model_path is not None or arguments:
            raise ValueError("give server_args or single arguments, not both")
        if not server_args.is_resolved:
            server_args = run_resolution_pipeline(server_args)
        self.server_args = server_args
        self._front = FrontEnd(server_args, scheduler_module=scheduler_module)
        self._native = NativeServing(self._front)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="sglang-engine", daemon=True)
        self._closed = False
        self._thread.start()
        atexit.register(self.shutdown)
        try:
            self._wait(self._start())
        except BaseException:
            self.shutdown()
            raise

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    # --- generation -----------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        *,
        stream: bool = False,
        **options: Any,
    ) -> Reply | Iterator[dict[str, Any]]:
        """Generate for one prompt or a list; the reply has the shape of /generate.

        With `stream`, an iterator of replies with the text so far. `options` are the other fields
        of /generate (return_logprob, rid, priority, ...).
        Raises: ValueError naming the field at fault; RuntimeError if the engine cannot answer.
        """
        job = self._job(prompt, sampling_params, input_ids, stream, options)
        if stream:
            return self._iterate(job)
        return self._wait(self._native.answer(job))

    async def async_generate(
        self,
        prompt: Prompt | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        *,
        stream: bool = False,
        **options: Any,
    ) -> Reply | AsyncIterator[dict[str, Any]]:
        """`generate` for a caller with an event loop; cancelling it ends the request."""
        job = self._job(prompt, sampling_params, input_ids, stream, options)
        if stream:
            return self._iterate_async(job)
        return await self._wait_async(self._native.answer(job))

    def _job(
        self,
        prompt: Prompt | None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None,
        input_ids: list[int] | list[list[int]] | None,
        stream: bool,
        options: dict[str, Any],
    ) -> GenerateJob:
        given = {
            "text": prompt,
            "input_ids": input_ids,
            "sampling_params": sampling_params,
            "stream": stream,
            **options,
        }
        body = {key: value for key, value in given.items() if value is not None}
        try:
            return self._native.prepare(decode_body(body, GenerateRequest))
        except RequestError as error:
            raise _python_error(error) from error

    def _iterate(self, job: GenerateJob) -> Iterator[dict[str, Any]]:
        updates = self._native.updates(job)
        try:
            while (reply := self._wait(_next_or_none(updates))) is not None:
                yield reply
        finally:
            self._leave(updates)

    def _leave(self, updates: AsyncGenerator[dict[str, Any], None]) -> None:
        """End a stream whose reader has left, which may be after shutdown or, when the collector
        finds the reader, in the loop's own thread."""
        if self._closed:
            return
        ending = self._submit(updates.aclose())
        if threading.current_thread() is not self._thread:
            ending.result()

    async def _iterate_async(self, job: GenerateJob) -> AsyncIterator[dict[str, Any]]:
        updates = self._native.updates(job)
        try:
            while (reply := await self._wait_async(_next_or_none(updates))) is not None:
                yield reply
        finally:
            if not self._closed:
                await self._wait_async(updates.aclose())

    # --- the rest -------------------------------------------------------------------------

    def flush_cache(self) -> bool:
        """Empty the prefix cache; False while requests run."""
        return bool(self._wait(self._front.flush_cache()).success)

    def get_server_info(self) -> dict[str, Any]:
        """Arguments, effective sizes and present figures."""
        return self._wait(self._front.server_info())

    def abort(self, rid: str = "", *, abort_all: bool = False) -> None:
        """End a request by its rid, or all."""
        self._loop.call_soon_threadsafe(
            lambda: self._front.manager.abort(rid=rid, abort_all=abort_all)
        )

    def shutdown(self) -> None:
        """End running requests, the scheduler process and the thread. Idempotent."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.shutdown)
        try:
            asyncio.run_coroutine_threadsafe(self._front.shutdown(), self._loop).result(
                _JOIN_SECONDS
            )
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_JOIN_SECONDS)
            self._front.client.kill()

    # --- the loop's thread ----------------------------------------------------------------

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    async def _start(self) -> None:
        self._front.start()
        await self._front.wait_ready()

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._closed:
            work.close()
            raise RuntimeError("this Engine has been shut down")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = self._submit(work)
        try:
            return future.result()
        except RequestError as error:
            raise _python_error(error) from error
        except BaseException:
            future.cancel()
            raise

    async def _wait_async(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await asyncio.wrap_future(self._submit(work))
        except RequestError as error:
            raise _python_error(error) from error


async def _next_or_none(
    updates: AsyncGenerator[dict[str, Any], None],
) -> dict[str, Any] | None:
    return await anext(updates, None)


def _python_error(error: RequestError) -> Exception:
    kind = ValueError if error.status < 500 else RuntimeError
    return kind(error.message)
