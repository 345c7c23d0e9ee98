"""Start servers for a comparison, and stop exactly those."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from sglang.parity.client import ServerError, request_json

START_TIMEOUT_S = 900


class ServerProcess:
    """One ``sglang.launch_server`` on a free loopback port; use as a context manager."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.arguments = list(arguments)
        self.url = f"http://127.0.0.1:{_free_port()}"
        self._log = tempfile.NamedTemporaryFile("w+", suffix=".log", delete=False)
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> ServerProcess:
        port = self.url.rsplit(":", 1)[1]
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "sglang.launch_server",
                *self.arguments,
                "--host",
                "127.0.0.1",
                "--port",
                port,
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise ServerError(
                    f"the server ended with status {self._process.returncode} while starting "
                    f"({' '.join(self.arguments)}):\n{self.log_tail()}"
                )
            try:
                request_json(self.url + "/health", timeout=5)
                return
            except ServerError:
                time.sleep(0.2)
        raise ServerError(
            f"{self.url} was not ready within {START_TIMEOUT_S} s:\n{self.log_tail()}"
        )

    def log_tail(self, lines: int = 20) -> str:
        """The last lines the server printed."""
        self._log.flush()
        text = Path(self._log.name).read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def stop(self) -> None:
        """Ask it to stop, then end it; only the process started here."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._process = None
        self._log.close()
        Path(self._log.name).unlink(missing_ok=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
