"""One server of the comparison as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from sglang.srt.utils.network import find_free_port

STOP_S = 20.0


class ServerFailed(RuntimeError):
    """The server ended or did not get ready; the message holds the end of its log."""


class ArmServer:
    """`sglang.launch_server` on a free loopback port; use as a context manager.

    start_s  seconds from the start of the process to its first healthy answer
    Raises: ServerFailed on entering if it ends or is not healthy within ``timeout_s``.
    """

    def __init__(
        self,
        flags: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: Path,
        timeout_s: float,
    ) -> None:
        self.port = find_free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self.command = [
            *(sys.executable, "-m", "sglang.launch_server"),
            *flags,
            *("--host", "127.0.0.1", "--port", str(self.port)),
        ]
        self.start_s = 0.0
        self._environment = {**os.environ, **environment}
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ArmServer:
        begin = time.monotonic()
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                self.command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        try:
            self._wait_healthy(begin + self._timeout_s)
        except BaseException:
            self.stop()
            raise
        self.start_s = time.monotonic() - begin
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _wait_healthy(self, end: float) -> None:
        assert self._process is not None
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise ServerFailed(
                    f"the server ended with status {self._process.returncode}:\n{self.log_tail()}"
                )
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise ServerFailed(
            f"the server was not healthy within {self._timeout_s:.0f} s:\n{self.log_tail()}"
        )

    def log_tail(self, lines: int = 30) -> str:
        """The last lines that the server printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        """End the process started here, and no other."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
