"""Clients of running servers: the native protocol, and the OpenAI one for other engines."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

REQUEST_TIMEOUT_S = 600.0


class ServerError(RuntimeError):
    """A server could not be reached or refused a request; the message says which and why."""


@dataclass
class Completion:
    """What a server answered.

    output      token ids, or characters where the server reports no ids
    num_tokens  tokens of the output, None if not reported
    prompt      prompt token ids if known
    cached      prompt tokens from the prefix cache, None if not reported
    digest      digest of the recurrent state at the end, None if not reported
    num_verify  verify steps that ran, None if not reported
    """

    text: str
    output: list[int] | list[str]
    prompt_text: str = ""
    num_tokens: int | None = None
    prompt: list[int] | None = None
    cached: int | None = None
    digest: str | None = None
    accept_length: float | None = None
    num_verify: int | None = None

    @property
    def has_ids(self) -> bool:
        """Whether ``output`` are token ids; an empty one is neither and goes with both."""
        return all(isinstance(item, int) for item in self.output[:1])


@dataclass(frozen=True)
class ServerFacts:
    """What a server says of itself; None where it says nothing.

    lossless            whether update tuples roll its states back
    scratch_bytes       memory that holds what a verify records
    total_tokens        tokens that fit its KV pool
    """

    lossless: bool | None = None
    scratch_bytes: int | None = None
    total_tokens: int | None = None


class Client(Protocol):
    """One running server, asked greedily."""

    url: str

    def complete(self, prompt: str, max_tokens: int) -> Completion: ...

    def complete_batch(self, prompts: Sequence[str], max_tokens: int) -> list[Completion]: ...

    def follow(self, first: Completion, text: str, max_tokens: int) -> Completion:
        """A second turn: the first one, its answer, and ``text`` after it."""

    def count(self, prompt: str) -> int:
        """Tokens of a prompt; a guess where the server does not say."""

    def flush(self) -> None:
        """Empty the prefix cache where the server offers that."""

    def gap(self, completion: Completion, position: int) -> float | None:
        """Difference of the two best log probabilities at an output position, if it can be had."""

    def facts(self) -> ServerFacts: ...


def request_json(
    url: str,
    body: dict | None = None,
    *,
    api_key: str | None = None,
    timeout: float = REQUEST_TIMEOUT_S,
) -> Any:
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


def check_listening(url: str) -> None:
    """Find a dead server before the other one has run. Raises: ServerError if nothing listens."""
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), timeout=10).close()
    except (OSError, ValueError) as error:
        raise ServerError(f"{url}: {error}; is the server running there?") from error


class NativeClient:
    """``/generate`` with token ids.

    digests  ask for state digests; None finds out whether the server knows them
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, digests: bool | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self._api_key = api_key
        self._digests = self._knows_digests() if digests is None else digests

    def _post(self, path: str, body: dict) -> Any:
        return request_json(self.url + path, body, api_key=self._api_key)

    def _knows_digests(self) -> bool:
        probe = self._body(1) | {"input_ids": [1], "return_state_digest": True}
        try:
            return "state_digest" in self._post("/generate", probe)["meta_info"]
        except ServerError:
            return False

    @staticmethod
    def _body(max_tokens: int) -> dict:
        params = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
        return {"sampling_params": params}

    def _generate(self, source: dict, max_tokens: int) -> Any:
        body = self._body(max_tokens) | source
        if self._digests:
            body["return_state_digest"] = True
        return self._post("/generate", body)

    @staticmethod
    def _completion(reply: dict, prompt: str, prompt_ids: list[int] | None) -> Completion:
        meta = reply.get("meta_info", {})
        ids = reply.get("output_ids")
        return Completion(
            text=reply["text"],
            output=ids if ids is not None else list(reply["text"]),
            prompt_text=prompt,
            num_tokens=meta.get("completion_tokens", None if ids is None else len(ids)),
            prompt=prompt_ids,
            cached=meta.get("cached_tokens"),
            digest=meta.get("state_digest"),
            accept_length=meta.get("spec_accept_length"),
            num_verify=meta.get("spec_verify_ct"),
        )

    def tokenize(self, prompt: str) -> list[int] | None:
        """Prompt ids, or None if the server has no /tokenize."""
        try:
            reply = self._post("/tokenize", {"prompt": prompt})
        except ServerError:
            return None
        return reply.get("tokens")

    def complete(self, prompt: str, max_tokens: int) -> Completion:
        ids = self.tokenize(prompt)
        source = {"text": prompt} if ids is None else {"input_ids": ids}
        return self._completion(self._generate(source, max_tokens), prompt, ids)

    def complete_batch(self, prompts: Sequence[str], max_tokens: int) -> list[Completion]:
        ids = [self.tokenize(prompt) for prompt in prompts]
        known = all(item is not None for item in ids)
        source = {"input_ids": ids} if known else {"text": list(prompts)}
        replies = self._generate(source, max_tokens)
        return [self._completion(r, p, i) for r, p, i in zip(replies, prompts, ids, strict=True)]

    def follow(self, first: Completion, text: str, max_tokens: int) -> Completion:
        prompt = first.prompt_text + first.text + text
        tail = self.tokenize(text)
        if first.prompt is None or tail is None or not first.has_ids:
            return self.complete(prompt, max_tokens)
        ids = [*first.prompt, *first.output, *tail]
        return self._completion(self._generate({"input_ids": ids}, max_tokens), prompt, ids)

    def count(self, prompt: str) -> int:
        ids = self.tokenize(prompt)
        return len(ids) if ids is not None else _guess_tokens(prompt)

    def flush(self) -> None:
        self._post("/flush_cache", {})

    def gap(self, completion: Completion, position: int) -> float | None:
        if completion.prompt is None or not completion.has_ids:
            return None
        body = self._body(1) | {
            "input_ids": [*completion.prompt, *completion.output[:position]],
            "return_logprob": True,
            "top_logprobs_num": 2,
        }
        top = self._post("/generate", body)["meta_info"]["output_top_logprobs"][0]
        return top[0][0] - top[1][0]

    def facts(self) -> ServerFacts:
        try:
            info = request_json(self.url + "/get_server_info", api_key=self._api_key)
        except ServerError:
            return ServerFacts()
        states = info.get("internal_states") or [{}]
        return ServerFacts(
            lossless=states[0].get("lossless_verify"),
            scratch_bytes=states[0].get("verify_scratch_bytes"),
            total_tokens=states[0].get("max_total_num_tokens"),
        )


class OpenAIClient:
    """``/v1/completions`` of any server; compares text where token ids are not returned."""

    flush_paths = ("/flush_cache", "/reset_prefix_cache")

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._api_key = api_key
        self._model = request_json(self.url + "/v1/models", api_key=api_key)["data"][0]["id"]

    def _choice(self, prompt: str, max_tokens: int, **options: int) -> tuple[dict, dict]:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            **options,
        }
        reply = request_json(self.url + "/v1/completions", body, api_key=self._api_key)
        return reply["choices"][0], reply.get("usage") or {}

    def complete(self, prompt: str, max_tokens: int) -> Completion:
        choice, usage = self._choice(prompt, max_tokens)
        details = usage.get("prompt_tokens_details") or {}
        ids = choice.get("token_ids")
        return Completion(
            text=choice["text"],
            output=ids or list(choice["text"]),
            prompt_text=prompt,
            num_tokens=usage.get("completion_tokens", len(ids) if ids else None),
            cached=details.get("cached_tokens"),
        )

    def complete_batch(self, prompts: Sequence[str], max_tokens: int) -> list[Completion]:
        return _concurrently([partial(self.complete, p, max_tokens) for p in prompts])

    def follow(self, first: Completion, text: str, max_tokens: int) -> Completion:
        return self.complete(first.prompt_text + first.text + text, max_tokens)

    def count(self, prompt: str) -> int:
        return _guess_tokens(prompt)

    def flush(self) -> None:
        """Try the calls of known engines; a server with none of them keeps its cache."""
        for path in self.flush_paths:
            try:
                request_json(self.url + path, {}, api_key=self._api_key)
                return
            except ServerError:
                continue

    def gap(self, completion: Completion, position: int) -> float | None:
        """Runs the prompt again with log probabilities; None if the server gives none."""
        try:
            choice, _ = self._choice(
                completion.prompt_text, max(1, len(completion.output)), logprobs=2
            )
        except ServerError:
            return None
        logprobs = choice.get("logprobs") or {}
        top = logprobs.get("top_logprobs") or []
        if not completion.has_ids:
            position = _token_at(logprobs.get("text_offset") or [], position)
        if not 0 <= position < len(top) or len(top[position]) < 2:
            return None
        best = sorted(top[position].values(), reverse=True)
        return best[0] - best[1]

    def facts(self) -> ServerFacts:
        return ServerFacts()


def _guess_tokens(text: str) -> int:
    return len(text) // 4


def _token_at(offsets: list[int], position: int) -> int:
    """Index of the token that holds character ``position`` of the output, -1 if unknown."""
    starts = [i for i, offset in enumerate(offsets) if offset - offsets[0] <= position]
    return starts[-1] if starts else -1


def _concurrently(calls: list[Callable[[], Completion]]) -> list[Completion]:
    with ThreadPoolExecutor(max_workers=len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]
