"""Start servers for a comparison, and stop exactly those."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from sglang.parity.client import ServerError, request_json
from sglang.srt.utils.network import find_free_port

START_TIMEOUT_S = 900
STOP_TIMEOUT_S = 30
LAUNCHER = ("sglang.launch_server",)


class ServerProcess:
    """One server on a free loopback port; use as a context manager.

    launcher  module to run, and what comes before the server's flags
    """

    def __init__(self, arguments: Sequence[str], *, launcher: Sequence[str] = LAUNCHER) -> None:
        self.arguments = list(arguments)
        self._launcher = launcher
        self.url = ""
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ServerProcess:
        port = find_free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._folder = tempfile.TemporaryDirectory(prefix="sglang-parity-")
        command = [sys.executable, "-m", *self._launcher, *self.arguments]
        with self._log_file.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            self._wait_until_ready(self._process)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def _log_file(self) -> Path:
        assert self._folder is not None
        return Path(self._folder.name) / "server.log"

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        end = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < end:
            if process.poll() is not None:
                raise ServerError(
                    f"the server ended with status {process.returncode} while starting "
                    f"({' '.join(self.arguments)}):\n{self.log_tail()}"
                )
            try:
                request_json(self.url + "/health", timeout=5)
                return
            except ServerError:
                time.sleep(0.1)
        raise ServerError(
            f"{self.url} was not ready within {START_TIMEOUT_S} s:\n{self.log_tail()}"
        )

    def log_tail(self, lines: int = 20) -> str:
        """The last lines the server printed."""
        return "\n".join(self._log_file.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        """Ask it to stop, then end it; only the process started here."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
