"""A tiny tokenizer, template and config for tests of the front end, and a server over a fake
scheduler. Needs no torch and no weights."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from sglang.srt.utils.network import find_free_port

END_OF_TEXT, IM_START, IM_END, THINK, THINK_END = 256, 257, 258, 259, 260
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")
VOCAB_SIZE = 280
CHAT_TEMPLATE = """{%- if tools %}{{- '<|im_start|>system\\n# Tools <tool_call> <function= ' }}
{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'forbidden' %}{{- raise_exception('no such role') }}{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking %}{{- '<think>\\n' }}{%- endif %}{%- endif %}"""
_CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 4096,
    "mtp_num_hidden_layers": 1,
    "eos_token_id": END_OF_TEXT,
    "dtype": "float32",
}


def byte_alphabet() -> list[str]:
    """Characters that stand for bytes 0..255 in a byte-level vocabulary."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def write_front_end_model(folder: Path) -> Path:
    """A model directory whose token ids 0..255 are the bytes of the text."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(byte_alphabet())}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in ADDED])
    tokenizer.save(str(folder / "tokenizer.json"))
    files: dict[str, Any] = {
        "config.json": _CONFIG,
        "tokenizer_config.json": {"eos_token": "<|im_end|>"},
        "generation_config.json": {"eos_token_id": [IM_END, END_OF_TEXT], "top_k": 20},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return folder


class FakeServer:
    """`sglang.launch_server` in a process of its own, over the fake scheduler or, with another
    `module`, the real one."""

    def __init__(
        self,
        model: Path | str,
        *flags: str,
        options: dict[str, Any] | None = None,
        module: str = "sglang.test.fake_server",
    ) -> None:
        self.port = find_free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        environment = {**os.environ, "SGLANG_FAKE_SCHEDULER": json.dumps(options or {})}
        self._log = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", module),
                *("--model-path", str(model), "--port", str(self.port), *flags),
            ],
            env=environment,
            stderr=self._log,
        )

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def wait_ready(self, timeout_s: float = 30.0) -> FakeServer:
        """Raises: AssertionError with the log if it does not get ready."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end and self.process.poll() is None:
            if self.status("/health") == 200:
                return self
            time.sleep(0.05)
        self.process.kill()
        raise AssertionError(f"the server is not ready: {self.log()}")

    def status(self, path: str) -> int | None:
        """HTTP status of a GET; None if nobody answers."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    def get(self, path: str) -> Any:
        """JSON of a GET."""
        with urllib.request.urlopen(self.url + path, timeout=10) as reply:
            return json.loads(reply.read())

    def counts(self) -> dict[str, Any]:
        """What the fake scheduler counted."""
        return self.get("/server_info")["internal_states"][0]

    def children(self) -> list[int]:
        """Process ids of living children."""
        found = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(self.process.pid)], capture_output=True, text=True
        )
        return [int(pid) for pid in found.stdout.split()]

    def log(self) -> str:
        """Everything on standard error so far."""
        self._log.seek(0)
        return self._log.read().decode()

    def stop(self, timeout_s: float = 10.0) -> int:
        """SIGTERM, then the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        return self.process.returncode


def is_alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
