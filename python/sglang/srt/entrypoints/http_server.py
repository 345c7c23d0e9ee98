"""The HTTP server: a FastAPI app over a front end, run by uvicorn until a signal or a death."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import HTTPException
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import Response
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect

from sglang.srt.arg_groups.check_values import check_values
from sglang.srt.arg_groups.pipeline import run_resolution_pipeline
from sglang.srt.entrypoints.anthropic.serving_messages import MESSAGES_PATH, anthropic_error
from sglang.srt.entrypoints.front_end import FrontEnd
from sglang.srt.entrypoints.gatekeeper import Gatekeeper, GateState
from sglang.srt.entrypoints.http_head import BoundedHeadProtocol
from sglang.srt.entrypoints.http_io import ClientGone, json_response
from sglang.srt.entrypoints.openai.errors import error_response
from sglang.srt.entrypoints.routes import Routes
from sglang.srt.entrypoints.scheduler_client import SCHEDULER_MODULE
from sglang.srt.managers.errors import RequestError, unavailable
from sglang.srt.server_args import ServerArgs
from sglang.version import __version__

logger = logging.getLogger(__name__)

_CLIENT_GONE_STATUS = 499
_CLOSE_SECONDS = 5
_LAST_ANSWERS_SECONDS = 1.0


def make_app(front_end: FrontEnd, gate: GateState) -> FastAPI:
    """The application; it neither starts nor stops the front end."""
    args = front_end.server_args
    app = FastAPI(title="sglang-lossless", version=__version__)
    app.state.schemas = {}
    Routes(front_end).add_to(app)
    _describe(app)
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(ClientGone, _on_client_gone)
    app.add_exception_handler(ClientDisconnect, _on_client_gone)
    app.add_exception_handler(StarletteHTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)
    app.add_middleware(
        Gatekeeper,
        state=gate,
        api_key=args.api_key,
        admin_api_key=args.admin_api_key,
        max_body_bytes=int(args.max_request_body_mb * (1 << 20)),
    )
    if args.cors_allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=args.cors_allow_origins,
            allow_methods=["*"],
            allow_headers=["*"],
        )
    return app


def _describe(app: FastAPI) -> None:
    """Add the bodies' schemas, which FastAPI does not know, to the OpenAPI description."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        description = make()
        schemas = description.setdefault("components", {}).setdefault("schemas", {})
        schemas.update(app.state.schemas)
        return description

    app.openapi = openapi  # type: ignore[method-assign]


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    if request.url.path.startswith(MESSAGES_PATH):
        return json_response(anthropic_error(error), error.status)
    return error_response(error)


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_GONE_STATUS)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException | StarletteHTTPException)
    where = f"{request.method} {request.url.path}"
    return error_response(RequestError(f"{where}: {error.detail}", status=error.status_code))


async def _on_bug(request: Request, error: Exception) -> Response:
    return error_response(
        RequestError("internal error; the server's log has the details", status=500)
    )


class DrainServer(uvicorn.Server):
    """The first SIGTERM or SIGINT lets running requests finish, the second ends the server now.

    Also ends it when the scheduler dies. `exit_code` is what the process should exit with: 128 and the
    signal's number after the second one.
    """

    def __init__(self, config: uvicorn.Config, front_end: FrontEnd, gate: GateState) -> None:
        super().__init__(config)
        self._front = front_end
        self._gate = gate
        self.exit_code = 0

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._serving_loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Signal handler."""
        if self.force_exit:
            return
        name = signal.Signals(sig).name
        if self._gate.draining:
            self.exit_code = 128 + sig
            self.force_exit = self.should_exit = True
            self._serving_loop.call_soon_threadsafe(self._end_at_once, name)
            return
        self._gate.draining = True
        asyncio.run_coroutine_threadsafe(self._drain(name), self._serving_loop)

    def _end_at_once(self, why: str) -> None:
        logger.warning(
            "a second signal (%s): ended at once, exit code %d, %d requests were cut off",
            why,
            self.exit_code,
            self._gate.num_inflight,
        )
        # uvicorn reports every task that is cancelled now, the application's own included.
        logging.getLogger("uvicorn.error").disabled = True
        self._front.manager.fail_all(unavailable("the server is shutting down"))

    async def _drain(self, why: str) -> None:
        limit_s = self._front.server_args.drain_timeout
        logger.info(
            "%s: finishing %d running requests within %g s; a second signal ends at once",
            why,
            self._gate.num_inflight,
            limit_s,
        )
        self._front.drain()
        end = time.monotonic() + limit_s
        while self._gate.num_inflight and time.monotonic() < end and not self.should_exit:
            await asyncio.sleep(0.05)
        if self._gate.num_inflight and not self.force_exit:
            logger.warning("%d requests were cut off", self._gate.num_inflight)
            self._front.manager.fail_all(unavailable("the server is shutting down"))
            await asyncio.sleep(_LAST_ANSWERS_SECONDS / 2)
        self.should_exit = True

    async def supervise(self) -> None:
        """Announce that the server is ready; end it with exit code 1 when the scheduler dies."""
        args = self._front.server_args
        try:
            await self._front.wait_ready()
            if not args.skip_server_warmup:
                await self._front.warm_up()
            logger.info(
                "The server is ready: %s, model %s",
                args.url(),
                self._front.config.served_model_name,
            )
        except (RuntimeError, RequestError) as error:
            if self._front.died is None and not self._gate.draining:
                logger.error("the server could not get ready: %s", error)
                self.exit_code = 1
                self.should_exit = True
                return
        await self._front.wait_death()
        self.exit_code = 1
        await asyncio.sleep(_LAST_ANSWERS_SECONDS)
        self.should_exit = True


def launch_server(server_args: ServerArgs, *, scheduler_module: str = SCHEDULER_MODULE) -> None:
    """Serve until a signal, then return; leave with SystemExit if it could not end well.

    Raises: ValueError or FileNotFoundError for arguments that cannot work (before anything
    starts); SystemExit with a non-zero code if the port is taken or the scheduler died.
    """
    check_values(server_args)
    _configure_logging(
        server_args.log_level
    )  # first, because what is decided for the user is logged
    server_args = run_resolution_pipeline(server_args)
    listener = _listen(server_args)
    try:
        server_args = _with_port(server_args, listener.getsockname()[1])
        front_end = FrontEnd(server_args, scheduler_module=scheduler_module)
    except BaseException:
        listener.close()
        raise
    gate = GateState()
    app = make_app(front_end, gate)
    config = uvicorn.Config(
        app,
        http=BoundedHeadProtocol,
        log_level="warning",
        log_config=None,
        timeout_graceful_shutdown=_CLOSE_SECONDS,
        timeout_keep_alive=75,
        server_header=False,
    )
    server = DrainServer(config, front_end, gate)
    app.router.lifespan_context = _lifespan(front_end, server)
    try:
        server.run(sockets=[listener])
    finally:
        front_end.client.kill()
        listener.close()
    if server.exit_code:
        sys.exit(server.exit_code)


def _lifespan(front_end: FrontEnd, server: DrainServer) -> Any:
    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        front_end.start()
        supervisor = asyncio.get_running_loop().create_task(server.supervise())
        yield
        supervisor.cancel()
        await front_end.shutdown()

    return lifespan


def _listen(args: ServerArgs) -> socket.socket:
    """A bound socket, so that a taken port shows before the model loads."""
    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((args.host, args.port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        logger.error(
            "--host %s --port %d cannot be used: %s; choose another port with --port",
            args.host,
            args.port,
            error.strerror,
        )
        sys.exit(1)
    listener.set_inheritable(False)
    return listener


def _with_port(args: ServerArgs, port: int) -> ServerArgs:
    """The arguments with the port that --port 0 has become."""
    return ServerArgs.from_resolved_dict({**args.to_dict(), "port": port})


def _configure_logging(level: str) -> None:
    logging.basicConfig(
        level=level.upper(), format="[%(asctime)s] %(message)s", datefmt="%Y-%m-%d %H:%M:%S"
    )
    logging.getLogger("uvicorn.error").addFilter(_is_worth_a_line)


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """False for what routers cause by asking whether a worker speaks HTTP/2."""
    return record.msg != "Invalid HTTP request received."
