"""Arguments about the HTTP server: address, access, logs, limits."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.arg_groups.flag import flag


@dataclass
class ServingFields:
    """How the server is reached and what it tells."""

    host: str = flag("127.0.0.1", "Address to listen on; 0.0.0.0 is every IPv4 address.")
    port: int = flag(
        30000,
        "TCP port to listen on; 0 takes a free one, which the log names.",
        minimum=0,
        maximum=65535,
    )
    api_key: str | None = flag(
        None,
        "Key that clients must send as a bearer token, on every route except health and metrics.",
        metavar="KEY",
        auto="no key asked for",
    )
    admin_api_key: str | None = flag(
        None,
        "Second key for the routes that change the server, such as flushing the cache.",
        metavar="KEY",
        auto="the value of --api-key",
    )
    cors_allow_origins: list[str] | None = flag(
        None,
        "Origins that browsers may call from; * is all.",
        metavar="ORIGIN",
        auto="none, cross-origin calls are refused",
    )
    max_request_body_mb: float = flag(
        32.0,
        "Largest request body in MiB; a larger one gets 413.",
        minimum=0.001,
        maximum=1 << 20,
    )
    log_level: str = flag(
        "info",
        "Least severe level that is logged.",
        choices=("debug", "info", "warning", "error"),
    )
    log_requests: bool = flag(
        False, "Log one JSON line for each finished request: sizes, times and how it ended."
    )
    decode_log_interval: int = flag(
        40, "Decode steps between two lines of the decode log.", minimum=1
    )
    enable_metrics: bool = flag(
        False, "Accepted for old command lines: Prometheus metrics are always served at /metrics."
    )
    tool_call_parser: str | None = flag(
        None,
        "Format of tool calls in the model's text.",
        choices=("qwen", "qwen25", "qwen3_coder"),
        auto="found from the chat template",
    )
    reasoning_parser: str | None = flag(
        None,
        "Format of reasoning in the model's text; the part inside it goes to reasoning_content.",
        choices=("qwen3",),
        auto="no splitting",
    )
    grammar_backend: str = flag(
        "llguidance",
        "Engine for structured output; none refuses requests that ask for it.",
        choices=("llguidance", "none"),
    )
    allow_auto_truncate: bool = flag(
        False, "Cut a prompt that is too long at its start instead of refusing it."
    )
    stream_interval: int = flag(1, "Tokens between two chunks of a streamed answer.", minimum=1)
    skip_server_warmup: bool = flag(False, "Report ready without having answered one request.")
    watchdog_timeout: float = flag(
        300.0,
        "Seconds without a sign of life after which a scheduler counts as stuck; it gives one every "
        "2 seconds when idle.",
        minimum=3,
    )
    drain_timeout: float = flag(
        30.0, "Seconds that running requests get to finish after SIGTERM.", minimum=0
    )
    grpc_mode: bool = flag(False, "Serve gRPC instead of HTTP.")
