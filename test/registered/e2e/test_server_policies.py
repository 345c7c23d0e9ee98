"""Limits and what happens at them, over the bundled model with speculation and a small pool.

Known faults F61, F89 to F93, F99.
"""

from __future__ import annotations

import concurrent.futures

import httpx
import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.front_end_case import FakeServer

register_cpu_ci(est_time=30, suite="e2e")

FLAGS = (
    *("--speculative-algorithm", "NEXTN", "--enable-linear-lossless-verify"),
    *("--max-total-tokens", "512", "--max-running-requests", "2", "--max-queued-requests", "3"),
)
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server():
    with FakeServer("demo", *FLAGS, module="sglang.launch_server") as running:
        yield running.wait_ready(60)


@pytest.fixture(scope="module")
def longest(server):
    """Prompt tokens of the largest request."""
    return server.get("/server_info")["max_req_input_len"]


def ask(server, path="/v1/completions", **body):
    return httpx.post(server.url + path, json=body, timeout=60)


def ids(count):
    return [100 + at % 500 for at in range(count)]


def test_largest_request_is_smaller_than_the_pool(server, longest):
    """Catches a limit that the pool cannot keep: the model's context is longer than the pool."""
    info = server.get("/server_info")
    assert longest < info["max_total_num_tokens"] == 512 < info["model_context_length"]


@pytest.mark.parametrize(
    ("path", "prompt", "field"),
    [
        ("/v1/completions", lambda n: {"prompt": ids(n), "max_tokens": 4}, "prompt"),
        (
            "/generate",
            lambda n: {"input_ids": ids(n), "sampling_params": {"max_new_tokens": 4}},
            "input_ids",
        ),
    ],
    ids=["completions", "generate"],
)
def test_prompts_around_the_limit(server, longest, path, prompt, field):
    """Catches a prompt that fits no pool and waits for ever, or one that fits and is refused
    (F90)."""
    for count in (longest - 1, longest):
        assert ask(server, path, **prompt(count)).status_code == 200
    for count in (longest + 1, longest + 2, 5000):
        reply = ask(server, path, **prompt(count))
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
        assert error["param"] == field
        assert str(count) in error["message"] and str(longest) in error["message"]


def test_a_chat_that_is_too_long_is_refused(server):
    reply = ask(
        server,
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "the sea " * 600}],
        max_tokens=4,
    )
    assert reply.json()["error"]["code"] == "context_length_exceeded"
    assert reply.json()["error"]["param"] == "messages"


@pytest.mark.parametrize("max_tokens", [40, 100_000])
def test_max_tokens_beyond_the_rest_is_clipped(server, longest, max_tokens):
    """Catches an answer that runs past the pool, or a request that is refused for its hope (F92)."""
    prompt = ids(longest - 19)
    reply = ask(server, prompt=prompt, max_tokens=max_tokens, **GREEDY).json()
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 20
    assert reply["usage"]["total_tokens"] == longest + 1


def test_max_tokens_zero_is_for_scoring(server):
    """Catches a token that nobody asked for, or a scoring request that is refused (F61)."""
    reply = ask(server, prompt="The sea", max_tokens=0)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "max_tokens")
    reply = ask(server, prompt="The sea", max_tokens=0, echo=True, logprobs=1).json()
    choice = reply["choices"][0]
    assert choice["text"] == "The sea" and reply["usage"]["completion_tokens"] == 0
    values = choice["logprobs"]["token_logprobs"]
    assert values[0] is None and all(value < 0 for value in values[1:])
    body = {"text": "The sea", "return_logprob": True, "logprob_start_len": 0}
    reply = ask(server, "/generate", **body, sampling_params={"max_new_tokens": 0}).json()
    assert reply["output_ids"] == [] and reply["meta_info"]["input_token_logprobs"]


def test_stop_texts_and_tokens_are_cut(server):
    """Catches a stop that stays in the text, or one that `no_stop_trim` cannot keep."""
    free = ask(server, prompt="The captain", max_tokens=30, return_token_ids=True, **GREEDY)
    choice = free.json()["choices"][0]
    word = choice["text"].split()[3]
    reply = ask(server, prompt="The captain", max_tokens=30, stop=[word], **GREEDY).json()
    cut = reply["choices"][0]
    assert cut["text"] == choice["text"][: choice["text"].index(word)]
    assert (cut["finish_reason"], cut["matched_stop"]) == ("stop", word)
    kept = ask(
        server, prompt="The captain", max_tokens=30, stop=[word], no_stop_trim=True, **GREEDY
    )
    assert kept.json()["choices"][0]["text"].endswith(word)
    token = choice["token_ids"][7]
    first = choice["token_ids"].index(token)
    reply = ask(
        server,
        prompt="The captain",
        max_tokens=30,
        stop_token_ids=[token],
        return_token_ids=True,
        **GREEDY,
    ).json()
    assert reply["choices"][0]["token_ids"] == choice["token_ids"][: first + 1]
    assert reply["usage"]["completion_tokens"] == first + 1
    whole = httpx.post(
        server.url + "/detokenize", json={"tokens": choice["token_ids"][:first]}, timeout=20
    )
    assert reply["choices"][0]["text"] == whole.json()["text"]


@pytest.mark.parametrize(
    ("option", "value", "is_refused"),
    [
        ("beam_width", 4, True),
        ("lora_path", "x", True),
        ("suffix", "x", True),
        ("best_of", 2, True),
        ("stop_regex", "a+", True),
        ("beam_width", None, False),
        ("beam_width", False, False),
        ("log_metrics", True, False),
        ("user", "somebody", False),
        ("best_of", 1, False),
    ],
)
def test_unknown_options_are_named(server, option, value, is_refused):
    """Catches an option that is silently ignored, or a router's no-op that is refused."""
    reply = ask(server, prompt="a", max_tokens=1, **{option: value})
    assert reply.status_code == (400 if is_refused else 200)
    if is_refused:
        assert option in reply.json()["error"]["message"]


def test_requests_over_the_queue_limit_are_answered(server):
    """Catches a request that waits for ever when 2 run and 3 wait, or one answer too few (F93)."""

    def one(at):
        return ask(server, prompt=ids(20 + at), max_tokens=60, **GREEDY)

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(one, range(16)))
    codes = [reply.status_code for reply in replies]
    assert set(codes) == {200, 503} and codes.count(200) >= 5
    for reply in replies:
        if reply.status_code == 503:
            assert int(reply.headers["retry-after"]) >= 1
        else:
            assert reply.json()["usage"]["completion_tokens"] == 60
    assert httpx.post(server.url + "/flush_cache", timeout=20).status_code == 200


def test_usage_counts_the_prompt_once(server):
    """Catches a prompt that counts for each of n sequences (F97)."""
    reply = ask(server, prompt=ids(30), max_tokens=5, n=3, **GREEDY | {"temperature": 0.8}).json()
    assert reply["usage"]["prompt_tokens"] == 30
    assert reply["usage"]["completion_tokens"] == 15


def test_a_long_prompt_is_cut_when_the_server_was_told_so():
    """Catches --allow-auto-truncate that cuts to the context instead of to what the pool holds."""
    with FakeServer(
        "demo", *FLAGS, "--allow-auto-truncate", module="sglang.launch_server"
    ) as running:
        running.wait_ready(60)
        limit = running.get("/server_info")["max_req_input_len"]
        for count in (limit + 1, 4000):
            usage = ask(running, prompt=ids(count), max_tokens=3, **GREEDY).json()["usage"]
            assert usage["prompt_tokens"] == limit and usage["completion_tokens"] == 1


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
