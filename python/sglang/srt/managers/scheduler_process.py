"""The scheduler's process: one JSON line in, messages over ZMQ, nothing else.

Started by the front end as ``python -m sglang.srt.managers.scheduler_process``. It ends with its
parent, on ShutdownReq, and after a fatal error, which it reports before it exits non-zero.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
import traceback

import zmq

from sglang.srt.managers.io_struct import (
    FatalErrorOutput,
    FromScheduler,
    ReadyOutput,
    decode_to_scheduler,
    encode_message,
)
from sglang.srt.managers.parent_watch import die_with_parent
from sglang.srt.mem_cache.plan_inputs import MemoryPlanError

logger = logging.getLogger(__name__)

IDLE_POLL_MS = 200
COMPILE_POLL_MS = 2
"""While a request waits for its grammar and nothing runs."""
INTEGRITY_CHECK_S = 5.0
"""Least time between two checks of the pools' books; a check walks the whole prefix tree."""


def main() -> int:
    """Read the start line, run until told to stop; the exit status says how it ended."""
    start = json.loads(sys.stdin.readline())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front end decides about Ctrl-C
    die_with_parent(int(start["parent_pid"]))
    logging.basicConfig(
        level=start["server_args"]["log_level"].upper(),
        format="[%(asctime)s] %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
    )
    # A waiting thread must sleep, not spin: a spinning barrier costs a neighbour its core.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    channel = Channel(start["recv_endpoint"], start["send_endpoint"])
    try:
        return _serve(start["server_args"], channel)
    except MemoryPlanError as error:  # a sentence for the operator, which the front end logs
        channel.send(FatalErrorOutput(message=str(error)))
        return 1
    except Exception as error:  # the process boundary: report the cause, then end
        logger.error("scheduler stopped:\n%s", traceback.format_exc())
        channel.send(FatalErrorOutput(message=f"{type(error).__name__}: {error}"))
        return 1
    finally:
        channel.close()


class Channel:
    """The two ZMQ sockets of the scheduler; it connects, the front end binds."""

    def __init__(self, recv_endpoint: str, send_endpoint: str) -> None:
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.RCVHWM, 0)
        self._inbox.connect(recv_endpoint)
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.setsockopt(zmq.SNDHWM, 0)
        self._outbox.setsockopt(zmq.LINGER, 2000)
        self._outbox.connect(send_endpoint)

    def send(self, message: FromScheduler) -> None:
        self._outbox.send(encode_message(message))

    def drain(self, wait_ms: int) -> list[bytes]:
        """Return all frames at hand; wait for the first one up to ``wait_ms``."""
        frames = []
        if wait_ms and not self._inbox.poll(wait_ms):
            return frames
        while True:
            try:
                frames.append(self._inbox.recv(zmq.NOBLOCK))
            except zmq.Again:
                return frames

    def close(self) -> None:
        self._inbox.close(0)
        self._outbox.close()
        self._context.term()


def _serve(raw_args: dict, channel: Channel) -> int:
    # torch is imported here, after the environment is set and the channel can report failures.
    from sglang.srt.managers.intake import Intake
    from sglang.srt.managers.scheduler_builder import build_engine
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs.from_resolved_dict(raw_args)
    engine = build_engine(args, channel.send)
    engine.grammars.prepare()
    scheduler = engine.scheduler
    intake = Intake(
        scheduler, engine.grammars, max_held=args.max_queued_requests, send=channel.send
    )
    channel.send(ReadyOutput(info=engine.info))
    next_check = 0.0
    was_idle = True
    while not scheduler.stopping:
        idle = scheduler.is_idle
        if idle and not was_idle and time.monotonic() >= next_check:
            scheduler.check_integrity()
            next_check = time.monotonic() + INTEGRITY_CHECK_S
        elif was_idle and not idle:
            scheduler.metrics.note_resume()
        was_idle = idle
        idle_wait = COMPILE_POLL_MS if intake.is_waiting else IDLE_POLL_MS
        for frame in channel.drain(idle_wait if idle else 0):
            intake.handle(decode_to_scheduler(frame))
        intake.hand_over()
        scheduler.step()
    engine.close()
    return 0


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Nothing is left to do, and giving back tens of gigabytes block by block takes longer than the
    # front end waits; the operating system takes all of it at once.
    os._exit(status)
