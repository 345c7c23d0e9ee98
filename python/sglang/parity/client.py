"""Clients of running servers: the native protocol, and the OpenAI one for other engines."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol


class ServerError(RuntimeError):
    """A server could not be reached or refused a request; the message says which and why."""


@dataclass
class Completion:
    """What a server answered.

    output   token ids, or characters where the server reports no ids
    prompt   prompt token ids if known
    cached   prompt tokens from the prefix cache, None if not reported
    digest   digest of the recurrent state at the end, None if not reported
    """

    text: str
    output: list[int] | list[str]
    prompt: list[int] | None = None
    cached: int | None = None
    digest: str | None = None
    accept_length: float | None = None


class Client(Protocol):
    """One running server, asked greedily."""

    url: str

    def complete(self, prompt: str, max_tokens: int) -> Completion: ...

    def complete_batch(self, prompts: Sequence[str], max_tokens: int) -> list[Completion]: ...

    def follow(self, prompt: str, first: Completion, text: str, max_tokens: int) -> Completion: ...

    def count(self, prompt: str) -> int: ...

    def flush(self) -> None: ...

    def gap(self, prompt: str, first: Completion | None, position: int) -> float | None: ...


def request_json(
    url: str, body: dict | None = None, *, api_key: str | None = None, timeout: float = 600
) -> dict:
    """GET, or POST with a JSON body. Raises: ServerError with the server's own message."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data)
    request.add_header("Content-Type", "application/json")
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key}")
    try:
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            text = reply.read().decode()
    except urllib.error.HTTPError as error:
        raise ServerError(f"{url}: {error.code} {error.read().decode()[:500]}") from error
    except OSError as error:
        raise ServerError(f"{url}: {error}; is the server running there?") from error
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return {"text": text}


class NativeClient:
    """``/generate`` with token ids; asks for state digests where the server knows them."""

    def __init__(self, url: str, *, api_key: str | None = None, digests: bool = True) -> None:
        self.url = url.rstrip("/")
        self._api_key = api_key
        self._digests = digests

    def _post(self, path: str, body: dict) -> dict:
        return request_json(self.url + path, body, api_key=self._api_key)

    def _body(self, max_tokens: int) -> dict:
        body: dict = {
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": max_tokens,
                "ignore_eos": True,
            }
        }
        if self._digests:
            body["return_state_digest"] = True
        return body

    def _completion(self, reply: dict, prompt_ids: list[int] | None) -> Completion:
        meta = reply.get("meta_info", {})
        ids = reply.get("output_ids")
        return Completion(
            text=reply["text"],
            output=ids if ids is not None else list(reply["text"]),
            prompt=prompt_ids,
            cached=meta.get("cached_tokens"),
            digest=meta.get("state_digest"),
            accept_length=meta.get("spec_accept_length"),
        )

    def tokenize(self, prompt: str) -> list[int] | None:
        """Prompt ids, or None if the server has no /tokenize."""
        try:
            reply = self._post("/tokenize", {"prompt": prompt})
        except ServerError:
            return None
        return reply.get("tokens")

    def _prompt_body(self, prompt: str, max_tokens: int) -> tuple[dict, list[int] | None]:
        ids = self.tokenize(prompt)
        source = {"text": prompt} if ids is None else {"input_ids": ids}
        return self._body(max_tokens) | source, ids

    def complete(self, prompt: str, max_tokens: int) -> Completion:
        body, ids = self._prompt_body(prompt, max_tokens)
        return self._completion(self._post("/generate", body), ids)

    def complete_batch(self, prompts: Sequence[str], max_tokens: int) -> list[Completion]:
        return _concurrently([lambda p=p: self.complete(p, max_tokens) for p in prompts])

    def follow(self, prompt: str, first: Completion, text: str, max_tokens: int) -> Completion:
        tail = self.tokenize(text)
        if first.prompt is None or tail is None or not _is_ids(first.output):
            return self.complete(prompt + first.text + text, max_tokens)
        ids = [*first.prompt, *first.output, *tail]
        reply = self._post("/generate", self._body(max_tokens) | {"input_ids": ids})
        return self._completion(reply, ids)

    def count(self, prompt: str) -> int:
        ids = self.tokenize(prompt)
        return len(ids) if ids is not None else len(prompt) // 4

    def flush(self) -> None:
        self._post("/flush_cache", {})

    def gap(self, prompt: str, first: Completion | None, position: int) -> float | None:
        """Log-probability difference of the two best tokens at an output position of ``first``."""
        if first is None or first.prompt is None or not _is_ids(first.output):
            return None
        ids = [*first.prompt, *first.output[:position]]
        body = {
            "input_ids": ids,
            "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
            "return_logprob": True,
            "top_logprobs_num": 2,
        }
        top = self._post("/generate", body)["meta_info"]["output_top_logprobs"][0]
        return top[0][0] - top[1][0]


class OpenAIClient:
    """``/v1/completions`` of any server; compares text where token ids are not returned."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._api_key = api_key
        self._model = request_json(self.url + "/v1/models", api_key=api_key)["data"][0]["id"]

    def complete(self, prompt: str, max_tokens: int) -> Completion:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        reply = request_json(self.url + "/v1/completions", body, api_key=self._api_key)
        choice = reply["choices"][0]
        details = (reply.get("usage") or {}).get("prompt_tokens_details") or {}
        return Completion(
            text=choice["text"],
            output=choice.get("token_ids") or list(choice["text"]),
            cached=details.get("cached_tokens"),
        )

    def complete_batch(self, prompts: Sequence[str], max_tokens: int) -> list[Completion]:
        return _concurrently([lambda p=p: self.complete(p, max_tokens) for p in prompts])

    def follow(self, prompt: str, first: Completion, text: str, max_tokens: int) -> Completion:
        return self.complete(prompt + first.text + text, max_tokens)

    def count(self, prompt: str) -> int:
        return len(prompt) // 4

    def flush(self) -> None:
        """Other engines have no common call for this; their caches stay as they are."""

    def gap(self, prompt: str, first: Completion | None, position: int) -> float | None:
        return None


def _is_ids(output: list) -> bool:
    return bool(output) and isinstance(output[0], int)


def _concurrently(calls: list[Callable[[], Completion]]) -> list[Completion]:
    with ThreadPoolExecutor(max_workers=len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]
