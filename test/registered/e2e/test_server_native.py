"""/generate and the routes that routers, benchmarks and operators call."""

from __future__ import annotations

import json
import urllib.request

import httpx
import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.front_end_case import FakeServer, write_front_end_model

register_cpu_ci(est_time=8, suite="e2e")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    model = write_front_end_model(tmp_path_factory.mktemp("model"))
    with FakeServer(model, options={"width": 3}) as running:
        yield running.wait_ready()


def generate(server, **body):
    return httpx.post(server.url + "/generate", json=body, timeout=20)


def test_single(server):
    """Catches a change of names in meta_info, which clients read (F108)."""
    reply = generate(
        server, text="abcdef", sampling_params={"max_new_tokens": 4}, rid="mine"
    ).json()
    meta = reply["meta_info"]
    assert reply["text"] == "abcd" and reply["output_ids"] == [97, 98, 99, 100]
    assert meta.pop("e2e_latency") > 0
    assert meta == {
        "id": "mine",
        "finish_reason": {"type": "length", "length": 4},
        "prompt_tokens": 6,
        "completion_tokens": 4,
        "cached_tokens": 1,
        "spec_verify_ct": 3,
        "spec_accept_length": 1.0,
        "spec_accept_token_num": 3,
    }


def test_lists_keep_their_order(server):
    """Catches replies in the order of finishing, and a one-entry list that loses its brackets."""
    replies = generate(
        server,
        text=["a", "bb"],
        sampling_params=[{"max_new_tokens": 9}, {"max_new_tokens": 2}],
        rid=["x", "y"],
    ).json()
    assert [r["text"] for r in replies] == ["a" * 9, "bb"]
    assert [r["meta_info"]["id"] for r in replies] == ["x", "y"]
    assert (
        len(generate(server, input_ids=[[97]], sampling_params={"max_new_tokens": 1}).json()) == 1
    )
    many = generate(server, text="a", sampling_params={"max_new_tokens": 1, "n": 2}).json()
    assert len(many) == 2


def test_stream_is_cumulative(server):
    """Catches deltas where benchmark clients expect the text so far."""
    body = {"text": "abcdefg", "sampling_params": {"max_new_tokens": 7}, "stream": True}
    with httpx.stream("POST", server.url + "/generate", json=body) as reply:
        lines = [line[6:] for line in reply.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    texts = [json.loads(line)["text"] for line in lines[:-1]]
    assert texts[-1] == "abcdefg" and all(b.startswith(a) for a, b in zip(texts, texts[1:]))
    assert json.loads(lines[-2])["meta_info"]["completion_tokens"] == 7


def test_logprobs(server):
    """Catches log probabilities that lose their prompt part, top list or selection."""
    meta = generate(
        server,
        text="abc",
        sampling_params={"max_new_tokens": 2},
        return_logprob=True,
        logprob_start_len=1,
        top_logprobs_num=2,
        token_ids_logprob=[5],
        return_text_in_logprobs=True,
    ).json()["meta_info"]
    assert meta["input_token_logprobs"] == [[-1.0, 98, "b"], [-1.0, 99, "c"]]
    assert meta["output_token_logprobs"] == [[-0.5, 97, "a"], [-0.5, 98, "b"]]
    assert meta["output_top_logprobs"][0] == [[-0.5, 97, "a"], [-1.5, 98, "b"]]
    assert meta["output_token_ids_logprobs"][0] == [[-2.0, 5, "\x05"]]


def test_stop_reasons(server):
    """Catches a stop that does not say what matched."""
    reply = generate(
        server, text="ab\nc", sampling_params={"max_new_tokens": 9, "stop": "\n"}
    ).json()
    assert reply["text"] == "ab"
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": "\n"}
    reply = generate(server, text="abc", sampling_params={"stop_token_ids": [99]}).json()
    assert reply["text"] == "ab"
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": 99}
    assert reply["meta_info"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": []}, "text"),
        ({"text": ""}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[1], []]}, "input_ids"),
        ({"input_ids": ["a"]}, "input_ids"),
        ({"input_ids": [1000]}, "input_ids"),
        ({"text": "a", "sampling_params": {"temperature": "hot"}}, "temperature"),
        ({"text": "a", "sampling_params": {"beam_width": 3}}, "beam_width"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
        ({"text": "a", "sampling_params": {"min_new_tokens": -1}}, "min_new_tokens"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": 5}, "logprob_start_len"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": -1}, "top_logprobs_num"),
        ({"text": "a", "token_ids_logprob": [999]}, "token_ids_logprob"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid"),
        ({"text": "a", "lora_path": "x"}, "lora_path"),
        ({"text": "a", "sampling_params": {"stop": ""}}, "stop"),
        ({"text": "a", "sampling_params": {"logit_bias": {"1.5": 1}}}, "logit_bias"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_bad_request_names_the_field(server, body, param):
    """Catches a fault without a field, and a list of which a part was started (F88, F89)."""
    before = server.counts()["requests"]
    reply = generate(server, **body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
    assert server.counts()["requests"] == before


def test_tokenize_round_trip(server):
    """Catches tokens that differ from what the generation routes use."""
    post = lambda path, body: httpx.post(server.url + path, json=body).json()  # noqa: E731
    reply = post("/tokenize", {"prompt": "hé<think>"})
    assert reply == {"tokens": [104, 195, 169, 259], "count": 4, "max_model_len": 128}
    assert post("/v1/detokenize", {"tokens": reply["tokens"]}) == {"text": "hé<think>"}
    lists = post("/tokenize", {"prompt": ["a", "bc"]})
    assert (lists["tokens"], lists["count"]) == ([[97], [98, 99]], [1, 2])
    assert post("/detokenize", {"tokens": [[97], [98]]}) == {"text": ["a", "b"]}
    chat = post("/tokenize", {"messages": [{"role": "user", "content": "a"}]})
    assert chat["tokens"][0] == 257
    assert "error" in post("/detokenize", {"tokens": [280]})
    assert "error" in post("/tokenize", {})


def test_facts(server):
    """Catches a missing field that routers and benchmark clients read."""
    info = server.get("/get_server_info")
    for name in ("model_path", "served_model_name", "tp_size", "version", "max_total_num_tokens"):
        assert name in info
    assert "api_key" not in info
    assert {"avg_spec_accept_length", "last_gen_throughput"} <= set(info["internal_states"][0])
    for path in ("/model_info", "/get_model_info"):
        assert server.get(path)["is_generation"] is True
    load = server.get("/v1/loads")
    assert load["dp_rank_count"] == 1 and load["loads"][0]["max_total_num_tokens"] == 4096
    assert server.get("/get_load")[0]["num_reqs"] == 0
    assert set(server.get("/version")) == {"version"}


def test_metrics_names(server):
    """Catches a renamed metric (F107, F108)."""
    generate(server, text="abcdef", sampling_params={"max_new_tokens": 4})
    with urllib.request.urlopen(server.url + "/metrics") as reply:
        assert reply.headers["content-type"].startswith("text/plain")
        text = reply.read().decode()
    names = """num_running_reqs num_queue_reqs num_used_tokens token_usage mamba_usage
        max_total_num_tokens gen_throughput cache_hit_rate spec_accept_length spec_accept_rate
        prompt_tokens_total generation_tokens_total cached_tokens_total num_requests_total
        num_aborted_requests_total time_to_first_token_seconds_count
        inter_token_latency_seconds_count e2e_request_latency_seconds_count
        queue_time_seconds_count verify_scratch_bytes""".split()
    values = dict(
        line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#")
    )
    model = server.get("/model_info")["served_model_name"]
    for name in names:
        assert f'sglang:{name}{{model_name="{model}"}}' in values, name
    assert float(values[f'sglang:generation_tokens_total{{model_name="{model}"}}']) >= 4


def test_probes_are_not_counted(server):
    """Catches latency figures that mix users' requests with the server's own."""

    def ended():
        with urllib.request.urlopen(server.url + "/metrics") as reply:
            lines = reply.read().decode().splitlines()
        return next(line for line in lines if line.startswith("sglang:num_requests_total"))

    before = ended()
    assert server.status("/health_generate") == 200
    assert ended() == before
    generate(server, text="a", sampling_params={"max_new_tokens": 1})
    assert ended() != before


def test_flush_and_health(server):
    """Catches a probe that fails on an idle server."""
    for method in ("GET", "POST"):
        assert httpx.request(method, server.url + "/flush_cache").json()["success"] is True
    for path in ("/health", "/ready", "/health_generate"):
        assert server.status(path) == 200


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
