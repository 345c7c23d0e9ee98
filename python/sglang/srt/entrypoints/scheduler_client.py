"""Starts the scheduler process, talks to it over ZMQ, and notices when it ends."""

from __future__ import annotations

import asyncio
import collections
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

import sglang
from sglang.srt.managers.io_struct import (
    FatalErrorOutput,
    FromScheduler,
    ShutdownReq,
    ToScheduler,
    decode_from_scheduler,
    encode_message,
)

logger = logging.getLogger(__name__)

SCHEDULER_MODULE = "sglang.srt.managers.scheduler_process"
_MAX_IPC_PATH_CHARS = 100
_RECEIVE_BURST = 64
_POLL_SECONDS = 0.1
_RETRY_SEND_SECONDS = 0.002


class SchedulerClient:
    """One scheduler process and the two sockets to it. All methods run in the event-loop thread.

    on_message  called with each message, in order
    on_death    called once with a sentence when the process ends without having been asked to
    `last_seen` is the time of the latest message (monotonic clock).
    """

    def __init__(
        self,
        *,
        module: str = SCHEDULER_MODULE,
        on_message: Callable[[FromScheduler], None],
        on_death: Callable[[str], None],
    ) -> None:
        self._module = module
        self._on_message = on_message
        self._on_death = on_death
        self._context: zmq.Context[Any] | None = None
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._unsent: collections.deque[bytes] = collections.deque()
        self._last_words: str | None = None
        self._closing = False
        self.last_seen = time.monotonic()

    @property
    def pid(self) -> int | None:
        """Process id of the scheduler, None before `start`."""
        return None if self._process is None else self._process.pid

    def start(self, server_args: dict[str, Any], *, environment: dict[str, str]) -> None:
        """Bind the sockets and start the process; `server_args` are resolved and JSON-compatible.

        `environment` is added to that of this process.

        The process is a child of the calling thread and ends with it, so the thread must last.
        Raises: OSError if sockets or process cannot be made.
        """
        self._loop = asyncio.get_running_loop()
        self._folder = _private_folder()
        self._context = zmq.Context(io_threads=1)
        to_scheduler, from_scheduler = (
            f"ipc://{self._folder / name}" for name in ("to_scheduler", "from_scheduler")
        )
        self._push = self._bind(zmq.PUSH, to_scheduler)
        self._pull = self._bind(zmq.PULL, from_scheduler)
        self._loop.add_reader(int(self._pull.getsockopt(zmq.FD)), self._drain)
        self._process = subprocess.Popen(
            [sys.executable, "-m", self._module],
            stdin=subprocess.PIPE,
            env={**_child_environment(), **environment},
            start_new_session=True,
        )
        first_line = {
            "server_args": server_args,
            "recv_endpoint": to_scheduler,
            "send_endpoint": from_scheduler,
            "parent_pid": os.getpid(),
        }
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(first_line).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            logger.error("the scheduler process ended before it read its arguments")
        self._watch = self._loop.create_task(self._watch_process())

    def _bind(self, kind: int, endpoint: str) -> zmq.Socket[Any]:
        assert self._context is not None
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.bind(endpoint)
        return socket

    def send(self, message: ToScheduler) -> None:
        """Queue one message; never blocks. Dropped once the process has ended."""
        if self._process is None or self._closing:
            return
        self._unsent.append(encode_message(message))
        if len(self._unsent) == 1:
            self._flush()

    def _flush(self) -> None:
        while self._unsent and not self._closing:
            try:
                self._push.send(self._unsent[0], zmq.NOBLOCK)
            except zmq.Again:  # the scheduler has not connected yet
                self._loop.call_later(_RETRY_SEND_SECONDS, self._flush)
                return
            self._unsent.popleft()
        if not self._closing:
            self._schedule_drain()

    def _schedule_drain(self) -> None:
        """A ZMQ descriptor signals edges, and using a socket can swallow one: look once more."""
        self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        for _ in range(_RECEIVE_BURST):
            if self._closing:
                return
            try:
                frame = self._pull.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.last_seen = time.monotonic()
            try:
                message = decode_from_scheduler(frame)
            except msgspec.MsgspecError:
                logger.exception("a message from the scheduler cannot be read; it is dropped")
                continue
            if isinstance(message, FatalErrorOutput):
                self._last_words = message.message
            self._on_message(message)
        self._schedule_drain()

    async def _watch_process(self) -> None:
        assert self._process is not None
        while (code := self._process.poll()) is None:
            await asyncio.sleep(_POLL_SECONDS)
        if self._closing:
            return
        self._drain()
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        why = f": {self._last_words}" if self._last_words else ""
        self._on_death(f"the scheduler process ended ({how}){why}")

    async def shutdown(self, *, timeout_s: float = 5.0) -> None:
        """Ask the process to leave, kill it if it does not, free the sockets. Idempotent."""
        if self._process is None or self._closing:
            return
        if self._process.poll() is None:
            self.send(ShutdownReq())
        self._closing = True
        if self._watch is not None:
            self._watch.cancel()
        self._loop.remove_reader(int(self._pull.getsockopt(zmq.FD)))
        assert self._process.stdin is not None
        self._process.stdin.close()
        deadline = self._loop.time() + timeout_s
        while self._process.poll() is None and self._loop.time() < deadline:
            await asyncio.sleep(0.02)
        if self._process.poll() is None:
            logger.warning("the scheduler did not leave within %g s; killing it", timeout_s)
            self._process.kill()
            self._process.wait()
        self._release()

    def end(self, why: str) -> None:
        """Kill a process that is stuck; `on_death` follows with the reason."""
        if self._process is not None and self._last_words is None:
            self._last_words = why
            self._process.kill()

    def kill(self) -> None:
        """End the process at once; for exits that cannot wait."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._release()

    def _release(self) -> None:
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _private_folder() -> Path:
    """A new folder that only this user can enter, with a path short enough for a socket."""
    folder = Path(tempfile.mkdtemp(prefix="sglang-"))
    if len(str(folder)) > _MAX_IPC_PATH_CHARS - len("/from_scheduler"):
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="sglang-", dir="/tmp"))
    return folder


def _child_environment() -> dict[str, str]:
    """Our environment, with the package that runs here first on the child's path."""
    root = str(Path(sglang.__file__).resolve().parent.parent)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if root in paths:
        return dict(os.environ)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, paths)])}
