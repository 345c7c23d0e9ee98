"""Sampling options, request bodies and messages: what is accepted, and how a refusal reads."""

from __future__ import annotations

import math

import pytest

from sglang.srt.entrypoints.http_io import decode_body
from sglang.srt.entrypoints.native import GenerateRequest
from sglang.srt.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    sampling_values,
)
from sglang.srt.entrypoints.openai.serving_completions import split_prompts
from sglang.srt.managers import io_struct
from sglang.srt.managers.errors import RequestError
from sglang.srt.managers.front_end_config import pick_sampling_defaults
from sglang.srt.sampling.sampling_params import TOP_K_ALL, SamplingParams, to_float32
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit")

NAN = math.nan
BAD_VALUES = [
    ("temperature", -0.1),
    ("temperature", NAN),
    ("temperature", math.inf),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("top_p", NAN),
    ("top_k", 0),
    ("top_k", -2),
    ("min_p", -0.1),
    ("min_p", 1.5),
    ("frequency_penalty", 2.5),
    ("presence_penalty", -2.5),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", NAN),
    ("max_new_tokens", -1),
    ("min_new_tokens", -1),
    ("n", 0),
    ("n", 129),
    ("stop", [str(i) for i in range(65)]),
    ("stop", "x" * 1025),
    ("stop_token_ids", [100]),
    ("stop_token_ids", [-1]),
    ("stop_regex", "a+"),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("logit_bias", {100: 1.0}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {1: 101.0}),
    ("logit_bias", {1: NAN}),
    ("sampling_seed", 1 << 63),
]


@pytest.mark.parametrize(
    ("name", "value"), BAD_VALUES, ids=[f"{name}={str(value)[:12]}" for name, value in BAD_VALUES]
)
def test_bad_value_is_refused_by_name(name, value):
    """Catches a bound that is not checked, or a message that does not begin with the field."""
    params = SamplingParams(**{name: value})
    params.normalize()
    with pytest.raises(ValueError, match=f"^{name} "):
        params.verify(100)


def test_bounds_themselves_are_accepted():
    """Control: the same checks let the limits pass."""
    params = SamplingParams(
        temperature=0.0,
        top_p=1.0,
        top_k=-1,
        min_p=1.0,
        frequency_penalty=2.0,
        presence_penalty=-2.0,
        repetition_penalty=2.0,
        max_new_tokens=0,
        n=128,
        stop_token_ids=[99, 0],
        logit_bias={99: -100.0},
        sampling_seed=(1 << 63) - 1,
    )
    params.normalize()
    params.verify(100)


def test_normalize_brings_equal_meanings_together():
    """Catches greedy decoding, stop lists or -1 that reach the scheduler in two forms."""
    params = SamplingParams(temperature=0.0, stop="a", stop_token_ids=[3, 1, 3])
    params.normalize()
    params.normalize()
    assert (params.temperature, params.top_k, params.is_greedy) == (1.0, 1, True)
    assert (params.stop, params.stop_token_ids) == (["a"], [1, 3])
    other = SamplingParams(stop=["b", "b"])
    other.normalize()
    assert (other.top_k, other.is_greedy, other.stop) == (TOP_K_ALL, False, ["b"])


def test_floats_are_float32_values():
    """Catches a routed request that differs from a direct one by float32 widening."""
    direct, routed = SamplingParams(top_p=0.9), SamplingParams(top_p=to_float32(0.9))
    direct.normalize()
    routed.normalize()
    assert direct.top_p == routed.top_p != 0.9


def test_messages_survive_the_wire():
    """Catches a message that decodes as another one, or loses a field."""
    params = SamplingParams(max_new_tokens=3, logit_bias={5: 1.5}, stop=["x"])
    sent = [
        io_struct.TokenizedGenerateReqInput("r", [1, 2], params, True, 0, 2, [7], 1, True),
        io_struct.AbortReq("r", False, "gone"),
        io_struct.FlushCacheReqInput("q"),
        io_struct.GetInternalStateReq("q"),
        io_struct.HealthCheckReq("q"),
        io_struct.ShutdownReq(),
    ]
    for message in sent:
        assert io_struct.decode_to_scheduler(io_struct.encode_message(message)) == message
    logprob = io_struct.TokenLogprob(-0.5, 3, [(-0.5, 3), (-1.0, 4)], [(-2.0, 7)])
    output = io_struct.TokenOutput(
        "r", [3], io_struct.FinishReason("stop", 3), 2, 1, 0, 1, 1, [logprob], [logprob], 0.5
    )
    received = [
        io_struct.ReadyOutput({"max_req_input_len": 5}),
        io_struct.BatchTokenIDOutput([output], io_struct.SchedulerStats(num_running_reqs=1)),
        io_struct.FlushCacheReqOutput("q", False, "busy"),
        io_struct.GetInternalStateReqOutput("q", {"a": [1]}),
        io_struct.HealthCheckOutput("q"),
        io_struct.FatalErrorOutput("why"),
    ]
    for message in received:
        assert io_struct.decode_from_scheduler(io_struct.encode_message(message)) == message


@pytest.mark.parametrize(
    ("model", "body", "param"),
    [
        (CompletionRequest, {}, "prompt"),
        (CompletionRequest, {"prompt": "a", "max_tokens": "3"}, "max_tokens"),
        (CompletionRequest, {"prompt": "a", "max_tokens": -1}, "max_tokens"),
        (CompletionRequest, {"prompt": "a", "n": 0}, "n"),
        (CompletionRequest, {"prompt": "a", "temperature": [1]}, "temperature"),
        (CompletionRequest, {"prompt": "a", "stream": "yes"}, "stream"),
        (CompletionRequest, {"prompt": "a", "lora_path": "x"}, "lora_path"),
        (CompletionRequest, {"prompt": "a", "stream_options": {"x": 1}}, "stream_options"),
        (ChatCompletionRequest, {"messages": "hi"}, "messages"),
        (ChatCompletionRequest, {"messages": [1]}, "messages"),
        (ChatCompletionRequest, {"messages": [], "functions": [{}]}, "functions"),
        (GenerateRequest, {"text": 3}, "text"),
        (GenerateRequest, {"text": "a", "image_data": "x"}, "image_data"),
    ],
)
def test_malformed_body_names_the_field(model, body, param):
    """Catches a 400 that does not say which field is wrong (F88)."""
    with pytest.raises(RequestError) as caught:
        decode_body(body, model)
    assert caught.value.status == 400
    assert caught.value.param == param
    assert param in caught.value.message


def test_neutral_values_of_unknown_options_pass():
    """Catches a refusal of what routers add to every request."""
    with pytest.raises(RequestError, match="^return_hidden_states is not supported"):
        decode_body({"prompt": "a", "return_hidden_states": True}, CompletionRequest)
    body = {"prompt": "a", "log_metrics": True, "return_hidden_states": False, "lora_path": False}
    assert decode_body(body, CompletionRequest).prompt == "a"


@pytest.mark.parametrize("prompt", ["", "a", ["a", "b"], [1, 2], [[1], [2, 3]], ["a"]], ids=repr)
def test_prompt_forms(prompt):
    """Catches a form of prompt that is taken for another."""
    parts = split_prompts(prompt, "prompt")
    assert parts == ([prompt] if isinstance(prompt, str) or prompt == [1, 2] else prompt)


@pytest.mark.parametrize(
    "prompt", [[], 3, {"a": 1}, ["a", 1], [1, "a"], [[1], "a"], [True]], ids=repr
)
def test_other_prompt_forms_are_refused(prompt):
    """Catches a bool taken for a token id, and mixed lists."""
    with pytest.raises(RequestError, match="^prompt must be"):
        split_prompts(prompt, "prompt")


def test_options_reach_their_native_names():
    """Catches an option that is silently dropped on the way to the scheduler."""
    request = decode_body(
        {
            "messages": [{"role": "user", "content": "a"}],
            "seed": 5,
            "min_tokens": 2,
            "logit_bias": {"7": 1},
            "response_format": {"type": "json_object"},
            "stop": ["x"],
            "min_p": 0.1,
        },
        ChatCompletionRequest,
    )
    assert sampling_values(request) == {
        "sampling_seed": 5,
        "min_new_tokens": 2,
        "logit_bias": {7: 1.0},
        "json_schema": '{"type": "object"}',
        "stop": ["x"],
        "min_p": 0.1,
    }


@pytest.mark.parametrize(
    "given",
    [{"type": "xml"}, {}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": 1}],
)
def test_bad_response_format(given):
    """Catches an unknown format that falls back to plain text."""
    request = CompletionRequest(prompt="a", response_format=given)
    with pytest.raises(RequestError, match="^response_format"):
        sampling_values(request)


def test_generation_defaults_are_the_sampling_ones():
    """Catches eos ids or do_sample taken for sampling options."""
    config = {"eos_token_id": 1, "do_sample": True, "temperature": 0.6, "top_k": 0, "top_p": None}
    assert pick_sampling_defaults(config) == {"temperature": 0.6, "top_k": -1}


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
