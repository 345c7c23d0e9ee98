"""What a serving benchmark is asked to do, checked once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


class BenchError(RuntimeError):
    """The benchmark cannot run as asked; the message names the flag, the value and the way out."""


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, both included; NaN is in no range."""

    low: float
    high: float
    remark: str = ""


MOST = 100_000_000
COUNTS = Range(1, MOST)
COUNTS_OR_NONE = Range(0, MOST)
PORTS = Range(1, 65535)
RATES = Range(1e-6, math.inf, "inf sends all at once")
SHARES = Range(0, 1, "1 gives every request the full lengths")
SECONDS = Range(0, MOST)


def check_range(flag: str, value: float, allowed: Range) -> None:
    """Raises: BenchError naming the flag, the value and what is allowed."""
    if not allowed.low <= value <= allowed.high:
        remark = f"; {allowed.remark}" if allowed.remark else ""
        low, high = (f"{bound:.16g}" for bound in (allowed.low, allowed.high))
        raise BenchError(f"{flag} {value}: must be at least {low} and at most {high}{remark}")


def check_url(url: str) -> None:
    """Raises: BenchError unless it is an HTTP address whose port, if it has one, exists."""
    if not url.startswith(("http://", "https://")):
        raise BenchError(f"--base-url {url}: must begin with http:// or https://")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise BenchError(
            f"--base-url {url}: {error}; a port is a number from 1 to 65535"
        ) from error
    if not parts.hostname or port == 0:
        raise BenchError(f"--base-url {url}: write http://HOST:PORT with a port from 1 to 65535")


@dataclass(frozen=True)
class Backend:
    """How a kind of server is asked.

    route       "native" (/generate), "completions" or "chat" (OpenAI's)
    extensions  whether it takes fields that OpenAI's servers refuse (ignore_eos, continuous usage)
    """

    route: str
    port: int
    extensions: bool = True
    is_sglang: bool = False

    @property
    def path(self) -> str:
        paths = {
            "native": "/generate",
            "completions": "/v1/completions",
            "chat": "/v1/chat/completions",
        }
        return paths[self.route]


BACKENDS = {
    "sglang": Backend("native", 30000, is_sglang=True),
    "sglang-native": Backend("native", 30000, is_sglang=True),
    "sglang-oai": Backend("completions", 30000, is_sglang=True),
    "sglang-oai-chat": Backend("chat", 30000, is_sglang=True),
    "vllm": Backend("completions", 8000),
    "vllm-chat": Backend("chat", 8000),
    "openai": Backend("completions", 8000, extensions=False),
    "openai-chat": Backend("chat", 8000, extensions=False),
}
DATASETS = ("sharegpt", "random", "random-ids", "generated-shared-prefix", "custom")


@dataclass(frozen=True)
class LengthOptions:
    """Prompt and output lengths of the made-up data sets, in tokens."""

    random_input_len: int = 1024
    random_output_len: int = 1024
    random_range_ratio: float = 0.0
    sharegpt_output_len: int | None = None
    sharegpt_context_len: int | None = None
    gsp_num_groups: int = 64
    gsp_prompts_per_group: int = 16
    gsp_system_prompt_len: int = 2048
    gsp_question_len: int = 128
    gsp_output_len: int = 256


@dataclass(frozen=True)
class ServingOptions:
    """One serving benchmark. Names are those of the flags; times are in seconds.

    base_url       where the server is, without a trailing slash
    request_rate   requests per second, Poisson arrivals; inf sends everything at once
    max_concurrency  requests in flight at most; None is no limit
    """

    backend: str = "sglang"
    base_url: str = "http://127.0.0.1:30000"
    model: str | None = None
    served_model_name: str | None = None
    tokenizer: str | None = None
    dataset_name: str = "sharegpt"
    dataset_path: str | None = None
    num_prompts: int = 1000
    lengths: LengthOptions = field(default_factory=LengthOptions)
    tokenize_prompt: bool = False
    request_rate: float = math.inf
    max_concurrency: int | None = None
    warmup_requests: int = 1
    seed: int = 1
    flush_cache: bool = False
    disable_stream: bool = False
    disable_ignore_eos: bool = False
    disable_tqdm: bool = False
    extra_request_body: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    output_file: str | None = None
    output_details: bool = False
    tag: str | None = None
    ready_check_timeout_sec: float = 60.0
    request_timeout_sec: float = 6 * 3600.0

    @property
    def kind(self) -> Backend:
        return BACKENDS[self.backend]

    def check(self) -> None:
        """Raises: BenchError for the first value that cannot work."""
        if self.backend not in BACKENDS:
            raise BenchError(f"--backend {self.backend}: use one of {', '.join(BACKENDS)}")
        if self.dataset_name not in DATASETS:
            raise BenchError(
                f"--dataset-name {self.dataset_name}: use one of {', '.join(DATASETS)}"
            )
        check_url(self.base_url)
        self._check_numbers()
        if self.dataset_name in ("sharegpt", "custom") and self.dataset_path is None:
            raise BenchError(
                f"--dataset-name {self.dataset_name} needs --dataset-path FILE (nothing is "
                "downloaded); random-ids needs no file"
            )
        if self.dataset_path is not None and not Path(self.dataset_path).is_file():
            raise BenchError(
                f"--dataset-path {self.dataset_path}: no such file; --dataset-name random-ids needs none"
            )
        if self.tokenize_prompt and self.kind.route == "chat":
            raise BenchError(
                f"--tokenize-prompt: --backend {self.backend} takes messages, not token ids; use "
                "sglang, sglang-oai or vllm"
            )

    def _check_numbers(self) -> None:
        lengths = self.lengths
        for flag, value in (
            ("--num-prompts", self.num_prompts),
            ("--max-concurrency", self.max_concurrency),
            ("--random-input-len", lengths.random_input_len),
            ("--random-output-len", lengths.random_output_len),
            ("--sharegpt-output-len", lengths.sharegpt_output_len),
            ("--sharegpt-context-len", lengths.sharegpt_context_len),
            ("--gsp-num-groups", lengths.gsp_num_groups),
            ("--gsp-prompts-per-group", lengths.gsp_prompts_per_group),
            ("--gsp-system-prompt-len", lengths.gsp_system_prompt_len),
            ("--gsp-question-len", lengths.gsp_question_len),
            ("--gsp-output-len", lengths.gsp_output_len),
        ):
            if value is not None:
                check_range(flag, value, COUNTS)
        check_range("--warmup-requests", self.warmup_requests, COUNTS_OR_NONE)
        check_range("--request-rate", self.request_rate, RATES)
        check_range("--random-range-ratio", lengths.random_range_ratio, SHARES)
        check_range("--ready-check-timeout-sec", self.ready_check_timeout_sec, SECONDS)
