"""Where messages enter the scheduler; a request whose constraint is new waits here until it is compiled.

Compiling may take a second, and the scheduler's loop has every running request in it. llguidance lets go of
the interpreter's lock while it compiles, so a thread beside the loop does it and nobody else notices.
"""

from __future__ import annotations

import queue
import threading
from typing import Any

from sglang.srt.constrained.compiler import GrammarCompiler
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenIDOutput,
    FinishReason,
    TokenizedGenerateReqInput,
    TokenOutput,
    ToScheduler,
)
from sglang.srt.managers.scheduler import Scheduler, Send

Grammar = tuple[str, str]


class Intake:
    """Passes messages on to ``scheduler``, in the order in which they can be acted on.

    max_held  requests that may wait for their constraint at once; None for any number
    """

    def __init__(
        self,
        scheduler: Scheduler,
        grammars: GrammarCompiler,
        *,
        max_held: int | None,
        send: Send,
    ) -> None:
        self._scheduler = scheduler
        self._grammars = grammars
        self._max_held = max_held
        self._send = send
        self._held: dict[str, TokenizedGenerateReqInput] = {}
        self._waiting_for: dict[Grammar, list[TokenizedGenerateReqInput]] = {}
        self._todo: queue.SimpleQueue[Grammar] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Grammar, Any]] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether a request waits for its constraint."""
        return bool(self._held)

    def handle(self, message: ToScheduler) -> None:
        """Act on one message of the front end, now or once its constraint is compiled."""
        if isinstance(message, TokenizedGenerateReqInput) and self._must_wait(message):
            self._hold(message)
            return
        if isinstance(message, AbortReq):
            self._abort(message)
        self._scheduler.handle(message)

    def hand_over(self) -> None:
        """Pass on the requests whose constraint is compiled by now."""
        while self._waiting_for:
            try:
                grammar, result = self._done.get_nowait()
            except queue.Empty:
                return
            self._grammars.take_over(*grammar, result)
            for message in self._waiting_for.pop(grammar):
                if self._held.get(message.rid) is message:  # else aborted meanwhile
                    del self._held[message.rid]
                    self._scheduler.handle(message)

    def _must_wait(self, message: TokenizedGenerateReqInput) -> bool:
        grammar = message.sampling_params.grammar
        return grammar is not None and not self._grammars.is_quick(*grammar)

    def _hold(self, message: TokenizedGenerateReqInput) -> None:
        limit = self._max_held
        if limit is not None and len(self._held) >= limit:
            text = f"{limit} requests wait for their constraint to be compiled; try again"
            self._end(message.rid, FinishReason(type="abort", message=text, status_code=503))
            return
        grammar = message.sampling_params.grammar
        assert grammar is not None
        self._held[message.rid] = message
        if grammar in self._waiting_for:
            self._waiting_for[grammar].append(message)
            return
        self._waiting_for[grammar] = [message]
        self._todo.put(grammar)
        if self._worker is None:
            self._worker = threading.Thread(target=self._compile, daemon=True, name="grammars")
            self._worker.start()

    def _compile(self) -> None:
        while True:
            grammar = self._todo.get()
            self._done.put((grammar, self._grammars.try_compile(*grammar)))

    def _abort(self, message: AbortReq) -> None:
        rids = list(self._held) if message.abort_all else [message.rid]
        text = message.reason or "aborted by the client"
        for rid in rids:
            if self._held.pop(rid, None) is not None:
                self._scheduler.metrics.num_aborted += 1
                self._end(rid, FinishReason(type="abort", message=text, status_code=499))

    def _end(self, rid: str, reason: FinishReason) -> None:
        output = TokenOutput(rid=rid, new_token_ids=[], finish_reason=reason)
        self._send(BatchTokenIDOutput(items=[output]))
