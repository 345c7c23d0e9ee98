"""The HTTP routes; each reads a body, asks a serving object, writes the answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response

from sglang.srt.entrypoints.anthropic.protocol import CountTokensRequest, MessagesRequest
from sglang.srt.entrypoints.anthropic.serving_messages import MESSAGES_PATH, MessagesServing
from sglang.srt.entrypoints.front_end import HEALTH_TIMEOUT_SECONDS, FrontEnd
from sglang.srt.entrypoints.http_io import (
    decode_body,
    json_response,
    read_json,
    stream_response,
    until_disconnect,
)
from sglang.srt.entrypoints.native import GenerateRequest, NativeServing
from sglang.srt.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from sglang.srt.entrypoints.openai.responses_protocol import ResponsesRequest
from sglang.srt.entrypoints.openai.serving_chat import ChatServing
from sglang.srt.entrypoints.openai.serving_completions import CompletionServing
from sglang.srt.entrypoints.openai.serving_responses import ResponsesServing
from sglang.srt.entrypoints.openai.serving_tokens import TokenServing
from sglang.srt.entrypoints.status_page import PATHS as STATUS_PAGE_PATHS
from sglang.srt.entrypoints.status_page import page
from sglang.srt.managers.errors import RequestError, unavailable
from sglang.version import __version__

Handler = Callable[[Request], Awaitable[Response]]
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class AbortBody(msgspec.Struct, kw_only=True):
    """POST /abort_request."""

    rid: str = ""
    abort_all: bool = False
    abort_message: str | None = None


class Routes:
    """Handlers of one front end."""

    def __init__(self, front_end: FrontEnd) -> None:
        self._front = front_end
        self._completions = CompletionServing(front_end)
        self._chat = ChatServing(front_end)
        self._native = NativeServing(front_end)
        self._messages = MessagesServing(front_end, self._chat)
        self._responses = ResponsesServing(front_end, self._chat)
        self._tokens = TokenServing(front_end, self._chat)
        self._created = int(time.time())

    def add_to(self, app: FastAPI) -> None:
        """Register every route, with the body's schema for the OpenAPI description."""
        both = ["GET", "POST"]
        self._add(app, "/v1/completions", self.completions, ["POST"], CompletionRequest)
        self._add(app, "/v1/chat/completions", self.chat, ["POST"], ChatCompletionRequest)
        self._add(app, "/v1/responses", self.responses, ["POST"], ResponsesRequest)
        self._add(app, MESSAGES_PATH, self.messages, ["POST"], MessagesRequest)
        count_path = MESSAGES_PATH + "/count_tokens"
        self._add(app, count_path, self.count_tokens, ["POST"], CountTokensRequest)
        self._add(app, "/generate", self.generate, both[1:], GenerateRequest)
        for prefix in ("", "/v1"):
            self._add(app, prefix + "/tokenize", self.tokenize, ["POST"], TokenizeRequest)
            self._add(app, prefix + "/detokenize", self.detokenize, ["POST"], DetokenizeRequest)
        for path in STATUS_PAGE_PATHS:
            app.add_api_route(
                path, self.status_page, methods=["GET", "HEAD"], include_in_schema=False
            )
        self._add(app, "/abort_request", self.abort, ["POST"], AbortBody)
        self._add(app, "/flush_cache", self.flush_cache, both)
        self._add(app, "/v1/models", self.models, ["GET"])
        self._add(app, "/v1/models/{model_id:path}", self.model, ["GET"])
        self._add(app, "/health", self.health, ["GET"])
        self._add(app, "/ready", self.health, ["GET"])
        self._add(app, "/health_generate", self.health_generate, ["GET"])
        self._add(app, "/metrics", self.metrics, ["GET"])
        self._add(app, "/version", self.version, ["GET"])
        self._add(app, "/v1/loads", self.loads, ["GET"])
        self._add(app, "/get_load", self.get_load, ["GET"])
        for name in ("server_info", "get_server_info"):
            self._add(app, "/" + name, self.server_info, ["GET"])
        for name in ("model_info", "get_model_info"):
            self._add(app, "/" + name, self.model_info, ["GET"])

    def _add(
        self,
        app: FastAPI,
        path: str,
        handler: Handler,
        methods: list[str],
        body: type | None = None,
    ) -> None:
        extra: dict[str, Any] | None = None
        if body is not None:
            (schema,), components = msgspec.json.schema_components(
                [body], ref_template="#/components/schemas/{name}"
            )
            app.state.schemas.update(components)
            extra = {
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": schema}},
                }
            }
        if "{" in path:
            name = path.partition("{")[2].partition(":")[0]
            place = {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            extra = {"parameters": [place]}
        name = path.strip("/").replace("/", "_")
        for method in methods:
            app.add_api_route(
                path,
                handler,
                methods=[method],
                response_model=None,
                openapi_extra=extra,
                operation_id=f"{method.lower()}_{name}",
            )
        if methods == ["GET"]:  # a route that also takes POST does something, which HEAD must not
            app.add_api_route(
                path, handler, methods=["HEAD"], response_model=None, include_in_schema=False
            )

    def _request_id(self, request: Request) -> str | None:
        """The id that a router gave the request, for bodies without one. A retry may carry the id
        of a request that still runs; it gets a new one."""
        given = request.headers.get("x-request-id") or None
        return None if given is None or self._front.manager.is_running(given) else given

    # --- generation -----------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        """OpenAI text completions."""
        body = decode_body(await read_json(request), CompletionRequest)
        job = self._completions.prepare(body, rid=self._request_id(request))
        if body.stream:
            return await stream_response(request, self._completions.stream(job))
        return json_response(await until_disconnect(request, self._completions.answer(job)))

    async def chat(self, request: Request) -> Response:
        """OpenAI chat completions."""
        body = decode_body(await read_json(request), ChatCompletionRequest)
        job = self._chat.prepare(body, rid=self._request_id(request))
        if body.stream:
            return await stream_response(request, self._chat.stream(job))
        return json_response(await until_disconnect(request, self._chat.answer(job)))

    async def responses(self, request: Request) -> Response:
        """OpenAI responses, stateless."""
        body = decode_body(await read_json(request), ResponsesRequest)
        job = self._responses.prepare(body, rid=self._request_id(request))
        if body.stream:
            return await stream_response(request, self._responses.stream(body, job))
        return json_response(await until_disconnect(request, self._responses.answer(body, job)))

    async def messages(self, request: Request) -> Response:
        """Anthropic messages."""
        body = decode_body(await read_json(request), MessagesRequest)
        job = self._messages.prepare(body, rid=self._request_id(request))
        if body.stream:
            return await stream_response(request, self._messages.stream(job))
        return json_response(await until_disconnect(request, self._messages.answer(job)))

    async def count_tokens(self, request: Request) -> Response:
        """Prompt length of an Anthropic request."""
        body = decode_body(await read_json(request), CountTokensRequest)
        return json_response(self._messages.count_tokens(body))

    async def generate(self, request: Request) -> Response:
        """SGLang's native generation."""
        body = decode_body(await read_json(request), GenerateRequest)
        job = self._native.prepare(body, rid=self._request_id(request))
        if body.stream:
            return await stream_response(request, self._native.stream(job))
        return json_response(await until_disconnect(request, self._native.answer(job)))

    async def abort(self, request: Request) -> Response:
        """End a request by its rid, or all."""
        body = decode_body(await read_json(request), AbortBody)
        if not body.rid and not body.abort_all:
            raise RequestError("give rid, or abort_all true", param="rid")
        self._front.manager.abort(rid=body.rid, abort_all=body.abort_all)
        return json_response({"success": True})

    # --- text and ids ---------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        """Ids of a text, texts or a chat."""
        body = decode_body(await read_json(request), TokenizeRequest)
        return json_response(self._tokens.tokenize(body))

    async def detokenize(self, request: Request) -> Response:
        """Text of ids."""
        body = decode_body(await read_json(request), DetokenizeRequest)
        return json_response(self._tokens.detokenize(body))

    # --- health ---------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        """200 if the server can answer now."""
        reason = self._front.unhealthy_reason()
        if reason is not None:
            raise unavailable(reason)
        return Response(status_code=200)

    async def health_generate(self, request: Request) -> Response:
        """200 if one token could be generated."""
        await self.health(request)
        try:
            await asyncio.wait_for(self._front.generate_one_token(), HEALTH_TIMEOUT_SECONDS)
        except TimeoutError:
            raise unavailable(
                f"no token within {HEALTH_TIMEOUT_SECONDS:g} s", code="stuck"
            ) from None
        return Response(status_code=200)

    async def status_page(self, request: Request) -> Response:
        """The page for a browser, and its two files."""
        return page(request.url.path)

    # --- facts ----------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        """The one model served."""
        return json_response({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request) -> Response:
        """The model, by its name."""
        model_id = request.path_params["model_id"]
        if model_id != self._front.config.served_model_name:
            raise RequestError(
                f"model {model_id!r} is not served here; {self._front.config.served_model_name!r} "
                "is",
                status=404,
                param="model",
                code="model_not_found",
            )
        return json_response(self._model_card())

    def _model_card(self) -> dict[str, Any]:
        config = self._front.config
        return {
            "id": config.served_model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "sglang",
            "root": config.model_path,
            "parent": None,
            "max_model_len": self._front.max_model_len,
        }

    async def server_info(self, request: Request) -> Response:
        """Arguments, sizes and present figures."""
        return json_response(await self._front.server_info())

    async def model_info(self, request: Request) -> Response:
        """What the model is."""
        return json_response(self._front.model_info())

    async def version(self, request: Request) -> Response:
        """The version of this server."""
        return json_response({"version": __version__})

    async def loads(self, request: Request) -> Response:
        """Load figures in the form that newer routers read."""
        return json_response(
            {
                "timestamp": time.time(),
                "version": __version__,
                "dp_rank_count": self._front.server_args.dp_size,
                "loads": self._front.loads(),
            }
        )

    async def get_load(self, request: Request) -> Response:
        """Load figures in the older form."""
        return json_response(
            [
                {
                    "dp_rank": load["dp_rank"],
                    "num_reqs": load["num_total_reqs"],
                    "num_waiting_reqs": load["num_waiting_reqs"],
                    "num_tokens": load["num_used_tokens"],
                }
                for load in self._front.loads()
            ]
        )

    async def metrics(self, request: Request) -> Response:
        """Prometheus exposition."""
        return Response(self._front.manager.metrics.render(), media_type=_METRICS_TYPE)

    async def flush_cache(self, request: Request) -> Response:
        """Empty the prefix cache; 400 while requests run."""
        result = await self._front.flush_cache()
        if not result.success:
            raise RequestError(
                f"the cache was not flushed: {result.message}", status=400, code="busy"
            )
        return json_response({"success": True, "message": result.message or "cache flushed"})
