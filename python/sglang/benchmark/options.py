"""What a serving benchmark is asked to do, checked once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class BenchError(RuntimeError):
    """The benchmark cannot run as asked; the message names the flag, the value and the way out."""


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
        if not self.base_url.startswith(("http://", "https://")):
            raise BenchError(f"--base-url {self.base_url}: must begin with http:// or https://")
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
        at_least_one = {
            "--num-prompts": self.num_prompts,
            "--max-concurrency": self.max_concurrency,
            "--random-input-len": lengths.random_input_len,
            "--random-output-len": lengths.random_output_len,
            "--sharegpt-output-len": lengths.sharegpt_output_len,
            "--sharegpt-context-len": lengths.sharegpt_context_len,
            "--gsp-num-groups": lengths.gsp_num_groups,
            "--gsp-prompts-per-group": lengths.gsp_prompts_per_group,
            "--gsp-system-prompt-len": lengths.gsp_system_prompt_len,
            "--gsp-question-len": lengths.gsp_question_len,
            "--gsp-output-len": lengths.gsp_output_len,
        }
        for name, value in at_least_one.items():
            if value is not None and value < 1:
                raise BenchError(f"{name} {value}: must be at least 1")
        if self.warmup_requests < 0:
            raise BenchError(f"--warmup-requests {self.warmup_requests}: must be 0 or more")
        if not self.request_rate > 0:
            raise BenchError(
                f"--request-rate {self.request_rate:g}: must be above 0; inf sends all at once"
            )
        if not 0 <= lengths.random_range_ratio <= 1:
            raise BenchError(
                f"--random-range-ratio {lengths.random_range_ratio:g}: must be in 0..1; 1 gives "
                "every request the full lengths"
            )
