"""bench_serving and bench_one_batch, end to end with the bundled model.

Mistakes caught: figures that a route does not deliver, an accept length that is missing or is the
server's since its start, requests that differ between two runs of a seed, and failures that look like
success.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang import bench_one_batch
from sglang.bench_serving import main
from sglang.srt.utils.network import find_free_port
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.front_end_case import FakeServer

register_cpu_ci(est_time=15, suite="e2e")

SPECULATION = ("--speculative-algorithm", "NEXTN", "--enable-linear-lossless-verify")
SMALL = ["--random-input-len", "48", "--random-output-len", "12", "--num-prompts", "4"]


@pytest.fixture(scope="module")
def server():
    flags = ("--device", "cpu", "--cpu-threads", "1", "--max-total-tokens", "8192", *SPECULATION)
    with FakeServer("demo", *flags, module="sglang.launch_server") as running:
        yield running.wait_ready(timeout_s=90)


def bench(server, tmp_path, *argv):
    """Exit code and the figures that were appended."""
    out = tmp_path / "out.jsonl"
    words = ["--port", str(server.port), "--dataset-name", "random-ids", *SMALL, "--disable-tqdm"]
    code = main([*words, "--output-file", str(out), *argv])
    return code, [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.parametrize("backend", ["sglang", "sglang-oai", "sglang-oai-chat", "vllm", "openai"])
def test_every_route(server, tmp_path, capsys, backend):
    code, (figures,) = bench(
        server,
        tmp_path,
        "--backend",
        backend,
        "--random-range-ratio",
        "1",
        "--max-concurrency",
        "2",
    )
    assert code == 0 and figures["completed"] == 4 and figures["failed"] == 0
    if backend != "openai":
        assert figures["total_output_tokens"] == 48, "ignore_eos gives every token"
    assert figures["total_input_tokens"] > 100 and figures["total_output_tokens_retokenized"] > 0
    for name in ("mean_ttft_ms", "mean_tpot_ms", "p99_itl_ms", "output_throughput", "duration"):
        assert figures[name] > 0, name
    assert figures["mean_ttft_ms"] < figures["mean_e2e_latency_ms"]
    assert figures["max_concurrent_requests"] <= 2
    if backend.startswith("sglang"):
        assert 1 <= figures["accept_length"] <= 4
        assert figures["server_info"]["max_total_num_tokens"] == 8192
        assert "Accept length:" in capsys.readouterr().out


def test_a_seed_repeats_a_run(server, tmp_path):
    argv = ["--output-details", "--flush-cache", "--warmup-requests", "2", "--tag", "t"]
    bench(server, tmp_path, *argv, "--seed", "3", "--tokenize-prompt", "--request-rate", "200")
    bench(server, tmp_path, *argv, "--seed", "3", "--tokenize-prompt")
    code, runs = bench(server, tmp_path, *argv, "--seed", "4", "--tokenize-prompt")
    assert code == 0 and len(runs) == 3, "one line a run"
    keys = ("input_lens", "output_lens", "generated_texts")
    assert all(runs[0][key] == runs[1][key] for key in keys)
    assert runs[0]["input_lens"] != runs[2]["input_lens"]
    assert runs[0]["errors"] == [""] * 4 and len(runs[0]["ttfts"]) == 4
    assert all(len(itls) < n for itls, n in zip(runs[0]["itls"], runs[0]["output_lens"]))
    assert runs[0]["tag"] == "t" and runs[0]["request_rate"] == 200.0


def test_whole_answers_and_extra_fields(server, tmp_path):
    code, runs = bench(
        server,
        tmp_path,
        "--disable-stream",
        "--extra-request-body",
        '{"max_new_tokens": 5, "return_logprob": true}',
    )
    assert code == 0 and runs[0]["total_output_tokens"] == 20 and runs[0]["mean_itl_ms"] == 0


def test_shared_prefixes_hit_the_cache(server, tmp_path):
    argv = "--gsp-num-groups 1 --gsp-prompts-per-group 3 --gsp-system-prompt-len 256"
    argv += " --gsp-question-len 16 --gsp-output-len 4 --max-concurrency 1 --flush-cache"
    words = ["--port", str(server.port), "--dataset-name", "generated-shared-prefix"]
    before = server.get("/v1/loads")["loads"][0]["cache_hit_rate"]
    assert main([*words, *argv.split(), "--tokenize-prompt", "--disable-tqdm"]) == 0
    assert server.get("/v1/loads")["loads"][0]["cache_hit_rate"] > max(0.3, before - 1)


def test_failures_are_told(server, tmp_path, capsys):
    code, runs = bench(server, tmp_path, "--random-input-len", "9000", "--random-range-ratio", "1")
    assert code == 1 and not runs
    assert "warm-up request failed" in capsys.readouterr().err
    code, runs = bench(server, tmp_path, "--extra-request-body", '{"no_such_option": 1}')
    assert code == 1 and "no_such_option" in capsys.readouterr().err
    assert (
        main(
            ["--port", str(server.port), "--dataset-name", "random-ids", *SMALL]
            + ["--tokenizer", str(tmp_path)]
        )
        == 1
    )
    assert "--tokenizer" in capsys.readouterr().err
    words = ["--port", str(server.port), "--dataset-name", "random-ids", *SMALL]
    assert main([*words, "--output-file", str(tmp_path / "no" / "folder")]) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_nobody_answers(capsys):
    words = ["--port", str(find_free_port()), "--dataset-name", "random-ids", *SMALL]
    assert main([*words, "--ready-check-timeout-sec", "0.2"]) == 1
    assert "no server answers at http://127.0.0.1:" in capsys.readouterr().err


def test_other_clients_find_the_tokenizer(server):
    """Catches the bundled name where clients expect something that a tokenizer library can load."""
    path = Path(server.get("/model_info")["tokenizer_path"])
    assert (path / "tokenizer.json").is_file()


def test_one_batch(tmp_path, capsys):
    out = tmp_path / "result.jsonl"
    words = ["--model-path", "demo", "--device", "cpu", "--cpu-threads", "1", *SPECULATION]
    cases = "--batch-size 1 3 --input-len 70 --output-len 9 --run-name mine --log-decode-step 1"
    trace = ["--profile", "--profile-filename-prefix", str(tmp_path / "trace")]
    argv = [*words, *cases.split(), *trace, "--result-filename", str(out)]
    assert bench_one_batch.main(argv) == 0
    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["batch_size"] for r in results] == [1, 3]
    for result in results:
        assert result["run_name"] == "mine" and 1 <= result["accept_length"] <= 4
        for name in ("prefill_latency", "median_decode_latency", "median_decode_throughput"):
            assert result[name] > 0
        assert result["prefill_latency"] < result["total_latency"]
        assert 2 <= result["decode_steps"] <= 9
    shown = capsys.readouterr().out
    assert all(
        word in shown for word in ("Prefill. latency:", "Decode.  median latency:", "Total.")
    )
    assert len(list(tmp_path.glob("trace_*.trace.json.gz"))) == 4


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--batch-size", "0"], "--batch-size 0: must be at least 1"),
        (["--batch-size", "1", "-3"], "--batch-size -3: must be at least 1"),
        (
            ["--input-len", "999999999999"],
            "--input-len 999999999999: must be at least 1 and at most",
        ),
        (["--output-len", "0"], "--output-len 0: must be at least 1"),
        (["--log-decode-step", "-1"], "--log-decode-step -1: must be at least 0"),
        (["--batch-size", "3", "--max-running-requests", "2"], "--max-running-requests"),
        (["--input-len", "9000", "--max-total-tokens", "4096"], "--max-total-tokens"),
        (["--model-path", "no/such/model"], "no/such/model"),
        (["--result-filename", "no/such/folder/x"], "no/such/folder"),
    ],
)
def test_a_batch_that_cannot_run(argv, why, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert bench_one_batch.main(["--model-path", "demo", "--device", "cpu", *argv]) == 2
    assert why in capsys.readouterr().err


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
