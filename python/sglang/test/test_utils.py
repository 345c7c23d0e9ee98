"""Base class and small helpers of the test files."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
import types
import unittest
from collections.abc import Callable
from typing import Any

from sglang.srt.environ import envs


def is_in_ci() -> bool:
    """Whether the tests run in CI (SGLANG_IS_IN_CI)."""
    return bool(envs.SGLANG_IS_IN_CI.get())


def _max_retry() -> int:
    given = envs.SGLANG_TEST_MAX_RETRY.get()
    if given is not None:
        return given
    return 1 if is_in_ci() else 0


def _with_retry(method: Callable[[], Any], name: str, attempts: int) -> Callable[[], Any]:
    @functools.wraps(method)
    def run() -> Any:
        for attempt in range(attempts + 1):
            try:
                return method()
            except unittest.SkipTest:
                raise
            except Exception as error:
                if attempt == attempts:
                    raise Exception(f"{name} failed after {attempts} retries: {error!r}") from error
                print(f"{name} failed ({error!r}), retry {attempt + 1} of {attempts}", flush=True)
        return None

    return run


def _cleaned_up_set_up_class(original: Callable[[type], None]) -> Callable[[type], None]:
    """Run tearDownClass also when setUpClass fails, which unittest does not do."""

    @functools.wraps(original)
    def set_up_class(cls: Any) -> None:
        try:
            original(cls)
        except BaseException:
            # Called through super() it is not the outermost; that one cleans up, once.
            if cls.setUpClass.__func__ is set_up_class:
                cls.tearDownClass()
            raise

    return set_up_class


class CustomTestCase(unittest.TestCase):
    """unittest.TestCase that cleans up after a failed setUpClass and can retry a failed test.

    A test method that fails is run again SGLANG_TEST_MAX_RETRY times (1 in CI, otherwise 0). The
    last failure is raised as a plain Exception; a skip is never retried.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = cls.__dict__.get("setUpClass")
        if isinstance(own, classmethod):
            cls.setUpClass = classmethod(_cleaned_up_set_up_class(own.__func__))  # type: ignore[assignment]

    def _callTestMethod(self, method: Callable[[], Any]) -> None:
        attempts = _max_retry()
        if attempts == 0 or inspect.iscoroutinefunction(method):
            super()._callTestMethod(method)  # type: ignore[misc]
        else:
            super()._callTestMethod(_with_retry(method, self.id(), attempts))  # type: ignore[misc]

    def setUp(self) -> None:
        print(f"[{self.id()}]", flush=True)


def maybe_stub_sgl_kernel() -> None:
    """Put an empty `sgl_kernel` module in place where the real package is not installed.

    The engine never needs it; test files written for machines that have it import it.
    """
    if "sgl_kernel" in sys.modules or importlib.util.find_spec("sgl_kernel") is not None:
        return
    stub = types.ModuleType("sgl_kernel")
    stub.__doc__ = "Empty stand-in for a package that is not installed."
    sys.modules["sgl_kernel"] = stub
