"""A headless Chromium for tests, driven over its debugging socket."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_START_SECONDS = 30.0


def find_chromium() -> str | None:
    """Path of an installed browser, or None."""
    return next((found for name in _NAMES if (found := shutil.which(name))), None)


class Page:
    """One tab. Use with ``async with``; ``events`` holds what the browser reported."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.events: list[dict[str, Any]] = []

    async def __aenter__(self) -> Page:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0")
        self._process = subprocess.Popen(
            [self._program, *flags, f"--user-data-dir={self._profile.name}", "about:blank"],
            stderr=subprocess.DEVNULL,
        )
        self._session = aiohttp.ClientSession()
        port = await self._port()
        async with self._session.get(f"http://127.0.0.1:{port}/json") as reply:
            targets = await reply.json()
        url = next(t["webSocketDebuggerUrl"] for t in targets if t["type"] == "page")
        self._socket = await self._session.ws_connect(url, max_msg_size=0)
        self._reader = asyncio.ensure_future(self._read())
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.call(f"{domain}.enable")
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._reader.cancel()
        await self._session.close()
        self._process.kill()
        self._process.wait()
        self._profile.cleanup()

    async def _port(self) -> int:
        file = Path(self._profile.name) / "DevToolsActivePort"
        end = time.monotonic() + _START_SECONDS
        while not (file.is_file() and file.read_text().strip()):
            if time.monotonic() > end or self._process.poll() is not None:
                raise RuntimeError(f"{self._program} opened no debugging port")
            await asyncio.sleep(0.05)
        return int(file.read_text().splitlines()[0])

    async def _read(self) -> None:
        async for message in self._socket:
            data = message.json()
            waiting = self._waiting.pop(data.get("id", 0), None)
            if waiting is None:
                self.events.append(data)
            else:
                waiting.set_result(data)

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the debugging protocol. Raises: RuntimeError with the browser's reason."""
        number = next(self._ids)
        future = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        await self._socket.send_json({"id": number, "method": method, "params": params})
        reply = await asyncio.wait_for(future, 30)
        if "error" in reply:
            raise RuntimeError(f"{method}: {reply['error']['message']}")
        return reply["result"]

    async def value(self, expression: str) -> Any:
        """JSON value of an expression in the page."""
        reply = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in reply:
            raise RuntimeError(f"{expression}: {reply['exceptionDetails']}")
        return reply["result"].get("value")

    async def wait_for(self, expression: str, seconds: float = 20.0) -> Any:
        """The expression's value once it is true. Raises: AssertionError if it stays false."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if found := await self.value(expression):
                return found
            await asyncio.sleep(0.1)
        raise AssertionError(f"never true within {seconds:g} s: {expression}")

    async def press(self, key: str, *, code: int, control: bool = False) -> None:
        """A key, down and up."""
        options = {"key": key, "windowsVirtualKeyCode": code, "modifiers": 2 if control else 0}
        await self.call("Input.dispatchKeyEvent", type="rawKeyDown", **options)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **options)
