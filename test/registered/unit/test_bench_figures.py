"""Prompts, arrivals and figures of benchmarks, without a server.

Mistakes caught: a seed that does not repeat prompts or arrivals, TPOT that counts the first token,
percentiles off by one, an accept length that counts the warm-up, a table or a JSON line without a
figure, flags that are taken and cannot work, and a profile that counts overlapping kernels twice.
"""

from __future__ import annotations

import json
import math
import sys

import pytest

from sglang.bench_serving import build_parser, main, read_options
from sglang.benchmark.client import Outcome, ServerClient
from sglang.benchmark.figures import (
    LATENCIES,
    AcceptCounts,
    compute,
    peak_concurrency,
    peak_output_rate,
    percentile,
    table,
)
from sglang.benchmark.load import LoadResult, arrival_times
from sglang.benchmark.options import BACKENDS, BenchError, LengthOptions, ServingOptions
from sglang.benchmark.prompts import Prompt, Vocabulary, make_prompts, warm_up_prompt
from sglang.bundled import resolve_model_path
from sglang.srt.managers.tokenizer import Tokenizer
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.repo import ROOT

register_cpu_ci(est_time=6, suite="unit")


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary(Tokenizer(resolve_model_path("demo")), 4096)


@pytest.fixture(scope="module", autouse=True)
def published_on_path():
    folder = str(ROOT / "benchmark" / "published")
    sys.path.insert(0, folder)
    yield
    sys.path.remove(folder)


def options(**changes) -> ServingOptions:
    lengths = {k: changes.pop(k) for k in list(changes) if k in LengthOptions.__dataclass_fields__}
    given = {"dataset_name": "random-ids", "num_prompts": 6, "lengths": LengthOptions(**lengths)}
    return ServingOptions(**(given | changes))


def outcome(start, ttft, gaps, *, prompt_len=10, error=""):
    made = Outcome(prompt_len, output_len=1 + len(gaps), start_s=start, ttft_s=ttft, error=error)
    made.itls_s = list(gaps)
    made.latency_s = ttft + sum(gaps)
    at = ttft
    made.arrivals = [(ttft, 1)]
    for gap in gaps:
        at += gap
        made.arrivals.append((at, 1))
    return made


@pytest.mark.parametrize("as_ids", [True, False], ids=["ids", "text"])
def test_a_seed_repeats_prompts(vocabulary, as_ids):
    small = {"random_input_len": 40, "random_output_len": 9, "tokenize_prompt": as_ids}
    first = make_prompts(options(seed=5, **small), vocabulary)
    assert first == make_prompts(options(seed=5, **small), vocabulary)
    assert first != make_prompts(options(seed=6, **small), vocabulary)
    assert all(1 <= p.output_len <= 9 and p.num_tokens <= 40 for p in first)
    assert len({p.num_tokens for p in first}) > 1, "the default range draws lengths"


def test_lengths_are_exact_when_asked(vocabulary):
    exact = options(
        random_input_len=33, random_output_len=4, random_range_ratio=1.0, tokenize_prompt=True
    )
    assert {(p.num_tokens, p.output_len) for p in make_prompts(exact, vocabulary)} == {(33, 4)}
    assert all(len(p.content) == 33 for p in make_prompts(exact, vocabulary))


def test_text_is_counted_as_the_server_will_read_it(vocabulary):
    prompts = make_prompts(options(random_input_len=64, random_range_ratio=1.0), vocabulary)
    for prompt in prompts:
        assert len(vocabulary.tokenizer.encode(prompt.content)) == prompt.num_tokens


def test_groups_share_a_prefix(vocabulary):
    made = make_prompts(
        options(
            dataset_name="generated-shared-prefix",
            tokenize_prompt=True,
            gsp_num_groups=3,
            gsp_prompts_per_group=4,
            gsp_system_prompt_len=16,
            gsp_question_len=5,
            gsp_output_len=2,
        ),
        vocabulary,
    )
    assert len(made) == 12
    assert len({tuple(p.content[:16]) for p in made}) == 3
    assert len({tuple(p.content) for p in made}) == 12


def test_files(vocabulary, tmp_path):
    talk = [{"from": "human", "value": f"question number {i} of many"} for i in range(8)]
    entries = [{"conversations": [turn, {"from": "gpt", "value": "a reply"}]} for turn in talk]
    share = tmp_path / "share.json"
    share.write_text(json.dumps([*entries, {"conversations": []}]))
    made = make_prompts(
        options(dataset_name="sharegpt", dataset_path=str(share), num_prompts=5), vocabulary
    )
    assert len(made) == 5 and all(p.content.startswith("question") for p in made)
    assert {p.output_len for p in made} == {len(vocabulary.tokenizer.encode("a reply"))}
    stretched = options(
        dataset_name="random", dataset_path=str(share), random_input_len=50, tokenize_prompt=True
    )
    assert all(len(p.content) == p.num_tokens for p in make_prompts(stretched, vocabulary))
    lines = tmp_path / "own.jsonl"
    lines.write_text('{"prompt": "one two three", "output_len": 7}\n\n{"prompt": [5, 6, 7]}\n')
    own = options(dataset_name="custom", dataset_path=str(lines), sharegpt_output_len=None)
    assert sorted(p.output_len for p in make_prompts(own, vocabulary)) == [7, 256]


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("sharegpt", "not json", "--dataset-name custom"),
        ("sharegpt", "{}", "list of conversations"),
        ("sharegpt", "[]", "no usable prompt"),
        ("custom", '{"prompt": 3}', "line 1"),
        ("custom", "{", "line 1 is not JSON"),
        ("custom", '{"prompt": "a", "output_len": "x"}', "output_len"),
    ],
)
def test_unusable_files(vocabulary, tmp_path, name, text, why):
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(BenchError, match=why):
        make_prompts(options(dataset_name=name, dataset_path=str(path)), vocabulary)
    with pytest.raises(BenchError, match="cannot be read"):
        make_prompts(options(dataset_name=name, dataset_path=str(tmp_path / "gone")), vocabulary)


def test_prompts_without_a_tokenizer():
    made = make_prompts(options(random_input_len=8), Vocabulary(None, 1000))
    assert all(isinstance(p.content, list) and max(p.content) < 1000 for p in made)
    with pytest.raises(BenchError, match="--tokenizer"):
        make_prompts(options(), Vocabulary(None, None))
    with pytest.raises(BenchError, match="--tokenizer"):
        make_prompts(options(backend="sglang-oai-chat"), Vocabulary(None, 1000))


def test_a_warm_up_shares_no_prefix():
    ids = Prompt([1, 2, 3, 4], 4, 100)
    assert warm_up_prompt(ids).content == [4, 1, 2, 3] and warm_up_prompt(ids).output_len == 32
    assert warm_up_prompt(Prompt("some text", 2, 8)).content[:4] != "some"


def test_arrivals():
    assert arrival_times(3, math.inf, 1) == [0.0, 0.0, 0.0]
    times = arrival_times(4000, 10.0, 1)
    assert times == arrival_times(4000, 10.0, 1) != arrival_times(4000, 10.0, 2)
    assert times[0] == 0.0 and times == sorted(times)
    assert times[-1] / len(times) == pytest.approx(0.1, rel=0.1)


def test_figures_of_a_known_run():
    done = [outcome(0.0, 0.5, [0.1] * 5), outcome(0.25, 1.0, [0.2] * 10)]
    failed = outcome(0.0, 9.0, [9.0], error="status 500")
    made = compute(
        options(max_concurrency=2, tag="x"),
        LoadResult([*done, failed], 4.0),
        retokenized=20,
        accept_length=2.5,
        server_info={"a": 1},
    )
    assert (made["completed"], made["failed"]) == (2, 1)
    assert (made["total_input_tokens"], made["total_output_tokens"]) == (20, 17)
    assert made["output_throughput"] == 17 / 4 and made["input_throughput"] == 5
    assert made["mean_ttft_ms"] == 750 and made["median_e2e_latency_ms"] == pytest.approx(2000)
    assert made["mean_tpot_ms"] == pytest.approx(150), "the first token does not count"
    assert made["max_itl_ms"] == pytest.approx(200)
    assert made["concurrency"] == pytest.approx(1.0) and made["max_concurrent_requests"] == 2
    for name in LATENCIES:
        for label in ("mean", "median", "std", "p90", "p95", "p99"):
            assert f"{label}_{name}_ms" in made
    assert json.loads(json.dumps(made)) == made
    shown = table(made)
    for label in ("Successful requests:", "Failed requests:", "Accept length:", "P99 ITL (ms):"):
        assert label in shown
    assert "Output token throughput (tok/s):         4.25" in shown
    alone = compute(
        options(), LoadResult(done, 4.0), retokenized=None, accept_length=None, server_info=None
    )
    assert "Accept" not in table(alone) and "retokenized" not in table(alone)


def test_percentiles():
    assert percentile([], 50) == 0.0
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    assert percentile([float(i) for i in range(101)], 99) == 99.0


def test_peaks():
    runs = [outcome(0.0, 0.4, [0.1] * 3), outcome(5.0, 0.4, [0.1]), outcome(0.5, 0.2, [])]
    assert peak_concurrency(runs) == 2
    assert peak_concurrency(runs[1:]) == 1
    assert peak_output_rate(runs) == 5
    assert peak_output_rate([]) == peak_concurrency([]) == 0


def test_tokens_of_a_chunk_share_its_wait():
    made = Outcome(4, start_s=0.0)
    made.add(2)
    made.add(4)
    assert len(made.itls_s) == 4 and len(set(made.itls_s)) == 1
    assert sum(made.itls_s) == pytest.approx(made.arrivals[1][0] - made.arrivals[0][0])


def test_accept_length_of_the_run_alone():
    def info(mean, steps):
        state = {"avg_spec_accept_length": mean, "spec_verify_ct": steps}
        return AcceptCounts.read({"internal_states": [state]})

    assert info(2.0, 100).since(info(1.0, 50)) == pytest.approx(3.0)
    assert info(2.0, 100).since(AcceptCounts(None, None)) == 2.0
    assert info(2.0, 100).since(info(2.0, 100)) is None
    assert AcceptCounts.read({"internal_states": [{"avg_spec_accept_length": 1.5}]}).mean == 1.5
    assert AcceptCounts.read(None).mean is None


def test_bodies_of_requests():
    def body(**changes):
        return ServerClient(options(**changes), "m").payload(Prompt("hi", 1, 7))

    extra = {"top_k": 3, "priority": 2, "sampling_params": {"min_p": 0.1}}
    native = body(extra_request_body=extra)
    assert native["text"] == "hi" and native["priority"] == 2 and native["stream"] is True
    assert native["sampling_params"] == {
        "temperature": 0.0,
        "max_new_tokens": 7,
        "ignore_eos": True,
        "top_k": 3,
        "min_p": 0.1,
    }
    assert "ignore_eos" not in body(backend="openai") and body(backend="vllm")["ignore_eos"] is True
    chat = body(backend="openai-chat", extra_request_body={"temperature": 1.0})
    assert chat["messages"][0]["content"] == "hi" and chat["temperature"] == 1.0
    assert body(backend="vllm", disable_stream=True).get("stream_options") is None


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--num-prompts", "0"], "--num-prompts 0"),
        (["--request-rate", "0"], "--request-rate 0"),
        (["--request-rate", "nan"], "--request-rate nan"),
        (["--max-concurrency", "-1"], "--max-concurrency -1"),
        (["--random-range-ratio", "1.5"], "--random-range-ratio 1.5"),
        (["--random-output-len", "0"], "--random-output-len 0"),
        (["--warmup-requests", "-1"], "--warmup-requests -1"),
        (["--extra-request-body", "{"], "is not JSON"),
        (["--extra-request-body", "[1]"], "must be an object"),
        (["--header", "nonsense"], "NAME=VALUE"),
        (["--base-url", "127.0.0.1:1"], "http://"),
        (["--backend", "sglang-oai-chat", "--tokenize-prompt"], "token ids"),
        (["--dataset-name", "sharegpt"], "--dataset-path"),
    ],
)
def test_options_that_cannot_work(argv, why, capsys):
    argv = argv if "--dataset-name" in argv else ["--dataset-name", "random-ids", *argv]
    assert main(argv) == 2
    assert why in capsys.readouterr().err


def test_options_of_the_command_line(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    read = read_options(["--backend", "vllm", "--dataset-name", "random", "--random-input", "5"])
    assert read.base_url == "http://127.0.0.1:8000" and read.lengths.random_input_len == 5
    assert read.headers == {"Authorization": "Bearer k"} and math.isinf(read.request_rate)
    shown = build_parser().format_help()
    assert all(name in shown for name in BACKENDS)
    with pytest.raises(SystemExit):
        read_options(["--no-such-flag"])


def test_a_timeline_counts_overlap_once(tmp_path):
    from kernel_table import family_of, profile_record, read_trace

    trace = {
        "traceEvents": [
            {"cat": "kernel", "name": "void grouped_gemm_kernel<1>", "ts": 0, "dur": 10},
            {"cat": "kernel", "name": "quantize_kernel", "ts": 5, "dur": 10},
            {"cat": "cpu_op", "name": "aten::add", "ts": 0, "dur": 99},
            {"cat": "kernel", "name": "paged_attention_kernel", "ts": 25, "dur": 5},
            {"cat": "kernel", "name": "open"},
        ]
    }
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace))
    record = profile_record(read_trace(path), num_steps=2)
    assert record["gpu_busy_us_per_step"] == 10 and record["gpu_span_us_per_step"] == 15
    assert record["gpu_idle_share"] == pytest.approx(1 / 3)
    assert record["families_us"] == {"experts": 5, "quantisation": 5, "attention": 2.5}
    assert record["gaps"][0]["after"] == "quantize_kernel" and record["gaps"][0]["total_us"] == 10
    assert family_of("nvjet_tst_64x8", 300.0) == "head" != family_of("nvjet_tst_64x8", 3.0)
    assert family_of("combine_splits_kernel", 1.0) == "attention"
    assert family_of("combine_kernel", 1.0) == "experts"


@pytest.mark.parametrize(
    ("name", "us_each", "family"),
    [
        ("hopper_gemm_kernel", 304.9, "FP8 products (experts, dense)"),
        ("hopper_product", 358.4, "FP8 products (experts, dense)"),
        ("sort_rows_kernel", 49.0, "experts"),
        ("hopper_prefill_kernel", 2197.9, "attention"),
        ("paged_attention_kernel", 348.4, "attention"),
        ("norm_rope_store_kernel", 101.3, "attention"),
        ("prefill_state_kernel", 207.1, "GDN"),
        ("prefill_chunk_kernel", 107.2, "GDN"),
        ("conv_prefill_kernel", 79.2, "conv"),
        ("narrow_linear_kernel", 4.4, "dense"),
        ("block_scaled_gemm_kernel", 9.1, "dense"),
        ("grouped_gemm_kernel", 94.7, "experts"),
        ("largest_of_parts_kernel", 13.3, "sampling"),
        ("largest_part_kernel", 1.2, "sampling"),
        ("nvjet_sm90_tst_512x32_64x3_2x1_v_bz_TNT", 251.9, "head"),
        ("Memcpy DtoH (Device -> Pinned)", 1505.2, "copies"),
        ("at::native::vectorized_elementwise_kernel [Fill]", 0.9, "copies"),
    ],
)
def test_families_of_kernels(name, us_each, family):
    """Catches prompts' attention taken for a fill, and long FP8 products taken for the head."""
    from kernel_table import family_of

    assert family_of(name, us_each) == family


def test_a_stored_profile_is_sorted_anew(tmp_path):
    """Catches a product of experts and dense maps beside the floor of one of them, and lost time."""
    from kernel_table import PRODUCTS
    from profile_step import main as profile_main

    rows = [
        {
            "name": "hopper_gemm_kernel",
            "family": "head",
            "calls": 2.0,
            "us": 600.0,
            "us_each": 300.0,
        },
        {"name": "place_kernel", "family": "experts", "calls": 1.0, "us": 20.0, "us_each": 20.0},
    ]
    record = {
        "gpu_busy_us_per_step": 620.0,
        "gpu_span_us_per_step": 640.0,
        "gpu_idle_share": 0.03,
        "families_us": {"head": 600.0, "experts": 20.0},
        "kernels": rows,
        "gaps": [],
        "floors_us": {"experts": 100.0, "dense": 140.0, "head": 5.0},
    }
    stored, again, table = (tmp_path / name for name in ("a.json", "b.json", "b.md"))
    stored.write_text(json.dumps({"steps": {"chunk": record}}))
    argv = ["--from-json", str(stored), "--out", str(again), "--markdown", str(table)]
    assert profile_main(argv) == 0
    step = json.loads(again.read_text())["steps"]["chunk"]
    assert step["families_us"] == {PRODUCTS: 600.0, "experts": 20.0}
    assert step["floors_us"] == record["floors_us"]
    assert f"| {PRODUCTS} | 600 | 96.8 % | 240 | 2.50 |" in table.read_text()
    assert "| experts | 20 | 3.2 % | - | - |" in table.read_text()


def test_floors_of_the_published_step():
    """Catches bytes counted per token instead of per step: the experts are read once, not 100 times."""
    from floors import StepShape, floors

    from sglang.test.plan_cases import model

    config = model("Qwen3.6-35B-A3B-FP8")
    verify = floors(config, StepShape(25, 4, 26_500, 3))
    weights_us = 33.3 * (1 << 30) / 4.3e6
    assert 0.8 * weights_us < verify["experts"] < weights_us
    assert verify["attention"] == pytest.approx(25 * 26_504 * 2048 * 13 / 4.3e6)
    assert 10_000 < sum(verify.values()) < 18_000
    one = floors(config, StepShape(1, 4, 26_500, 3))
    assert one["experts"] < verify["experts"] / 5 and one["head"] == verify["head"]


def test_published_capacities():
    from capacity import SETUPS, record_of

    for setup in SETUPS:
        record = record_of(setup, 80.0, 0.8)
        assert record["planned_gain"] == pytest.approx(setup.gained_tokens, rel=0.01)
        assert [round(g, 2) for g in record["planned_scratch_gib"]] == list(setup.scratch_gib)
        off, on = record["tokens_on_card"]
        assert on - off == pytest.approx(record["planned_gain"], abs=64)


def test_the_page_shows_todays_capacities():
    from capacity import SETUPS, record_of
    from capacity import table as capacity_table

    page = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    begin, end = "<!-- published_capacity: begin -->\n", "\n<!-- published_capacity: end -->"
    shown = page.partition(begin)[2].partition(end)[0]
    want = capacity_table([record_of(setup, 80.0, 0.8) for setup in SETUPS], 80.0, 0.8)
    assert shown == want, (
        "write the output of benchmark/published/capacity.py into docs/benchmarks.md"
    )


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
