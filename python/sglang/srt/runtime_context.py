"""The resolved arguments of this process, by subject.

A process publishes its arguments once, at start. Code that gets values through its constructor does
not need this module; it serves kernels and backends that are selected deep inside the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.arg_groups.fields.disaggregation import DisaggregationFields
    from sglang.srt.arg_groups.fields.exec_ import DeterministicFields, KernelFields, MambaFields
    from sglang.srt.arg_groups.fields.memory import MemoryFields
    from sglang.srt.arg_groups.fields.parallel import ParallelFields
    from sglang.srt.arg_groups.fields.speculative import SpeculativeFields
    from sglang.srt.server_args import ServerArgs


class ExecArgs:
    """How the model is executed, in three subjects."""

    def __init__(self, server_args: ServerArgs) -> None:
        self.mamba: MambaFields = server_args
        self.kernels: KernelFields = server_args
        self.deterministic: DeterministicFields = server_args


class ArgsOverride:
    """Arguments replaced between `install` and `restore`, or inside a `with`; for tests.

    What is written into the context meanwhile is undone too.
    """

    def __init__(self, context: RuntimeContext, values: dict[str, Any]) -> None:
        self._context = context
        self._values = values
        self._former: ServerArgs | None = None

    def install(self) -> ServerArgs:
        """Replace the arguments; without published ones, those of a server without a model."""
        from sglang.srt.server_args import ServerArgs

        self._former = self._context._server_args
        base = self._former if self._former is not None else ServerArgs(model_path="none")
        self._context._server_args = replace(base, **self._values)
        return self._context._server_args

    def restore(self) -> None:
        """Bring the former arguments back."""
        self._context._server_args = self._former

    def __enter__(self) -> ServerArgs:
        return self.install()

    def __exit__(self, *exc_info: object) -> None:
        self.restore()


class RuntimeContext:
    """Holds the arguments of one process; `publish` before anything reads them."""

    def __init__(self) -> None:
        self._server_args: ServerArgs | None = None

    def publish(self, server_args: ServerArgs) -> None:
        """Set the arguments of this process."""
        self._server_args = server_args

    @property
    def server_args(self) -> ServerArgs:
        """The published arguments. Raises RuntimeError if there are none yet."""
        if self._server_args is None:
            raise RuntimeError("no server arguments were published in this process yet")
        return self._server_args

    @contextlib.contextmanager
    def override(self, **values: Any) -> Iterator[ServerArgs]:
        """Replace some arguments inside a `with`, for tests; the former ones return after it."""
        former = self._server_args
        self._server_args = replace(self.server_args, **values)
        try:
            yield self._server_args
        finally:
            self._server_args = former

    def override_server_args(self, **values: Any) -> ArgsOverride:
        """`override` that works before anything was published and has explicit ends."""
        return ArgsOverride(self, values)


_context = RuntimeContext()


def get_context() -> RuntimeContext:
    """The context of this process."""
    return _context


def publish(server_args: ServerArgs) -> None:
    """Set the arguments of this process."""
    _context.publish(server_args)


def get_server_args() -> ServerArgs:
    """All arguments of this process."""
    return _context.server_args


def get_exec() -> ExecArgs:
    """Arguments about execution: `.mamba`, `.kernels`, `.deterministic`."""
    return ExecArgs(_context.server_args)


def get_memory() -> MemoryFields:
    """Arguments about pools and the prefix cache."""
    return _context.server_args


def get_schedule() -> ServerArgs:
    """Arguments about scheduling, and the number of state slots that the sizing has settled on."""
    return _context.server_args


def get_spec() -> SpeculativeFields:
    """Arguments about speculation."""
    return _context.server_args


def get_parallel() -> ParallelFields:
    """Arguments about several devices."""
    return _context.server_args


def get_disagg() -> DisaggregationFields:
    """Arguments about prefill/decode disaggregation."""
    return _context.server_args
