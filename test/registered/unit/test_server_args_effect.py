"""Flags that become something else or nothing: each is named with its value, none is dropped in silence.

Mistakes these catch: graph sizes without graphs, a flag of the other device, a number that another flag makes
idle, GPUs that are not there.
"""

from __future__ import annotations

import logging

import pytest

from sglang.srt.arg_groups import basic_hook
from sglang.srt.arg_groups.basic_hook import handle_cuda_graphs, reachable_graph_sizes
from sglang.srt.arg_groups.pipeline import run_resolution_pipeline
from sglang.srt.server_args import ServerArgs
from sglang.test.args_fixtures import cpu_args, write_model_config
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit")


@pytest.fixture
def model(tmp_path) -> str:
    return write_model_config(tmp_path / "model")


@pytest.mark.parametrize(
    ("values", "lines"),
    [
        (
            {"device": "cpu", "cuda_graph_bs": [4, 2]},
            ["--cuda-graph-bs 4 2: ignored, --device cpu captures no CUDA graphs"],
        ),
        (
            {"device": "cpu", "cuda_graph_max_bs": 8},
            ["--cuda-graph-max-bs 8: ignored, --device cpu captures no CUDA graphs"],
        ),
        ({"device": "cpu", "disable_cuda_graph": True}, []),
        (
            {"disable_cuda_graph": True, "cuda_graph_bs": [2], "cuda_graph_max_bs": 2},
            [
                "--cuda-graph-bs 2 and --cuda-graph-max-bs 2: --disable-cuda-graph captures no "
                "graphs; steps are only padded to these sizes"
            ],
        ),
        (
            {"cuda_graph_bs": [4, 1, 4], "cuda_graph_max_bs": 8},
            ["--cuda-graph-max-bs 8 becomes 4, the largest of --cuda-graph-bs"],
        ),
        ({"cuda_graph_bs": [4, 1, 4]}, []),
        ({"disable_cuda_graph": True}, []),
    ],
    ids=str,
)
def test_graph_sizes_that_become_no_graphs_are_named(values, lines, caplog):
    """Catches sizes that are dropped without a word."""
    with caplog.at_level(logging.WARNING):
        args = handle_cuda_graphs(ServerArgs("m", **{"device": "cuda", **values}))
    assert caplog.messages == lines
    if args.device == "cuda" and values.get("cuda_graph_bs", [2]) != [2]:
        assert args.cuda_graph_bs == [1, 4] and args.cuda_graph_max_bs == 4


def test_graph_sizes_are_one_at_least():
    with pytest.raises(ValueError, match="--cuda-graph-bs names no size"):
        handle_cuda_graphs(ServerArgs("m", device="cuda", cuda_graph_bs=[]))


@pytest.mark.parametrize(
    ("sizes", "most", "reachable"),
    [
        ([1, 2, 4], 4, [1, 2, 4]),
        ([1, 2, 4], 3, [1, 2, 3]),
        ([1, 64, 128], 48, [1, 48]),
        ([1, 2], 48, [1, 2]),
        ([9], 1, [1]),
        ([], 5, []),
    ],
)
def test_graph_sizes_stop_at_the_running_requests(sizes, most, reachable):
    """Catches graphs that are captured, and paid for, although no step ever has their size."""
    assert reachable_graph_sizes(sizes, most) == reachable


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"device": "cpu", "base_gpu_id": 2}, "--base-gpu-id 2: ignored with --device cpu"),
        ({"device": "cpu", "cpu_threads": 1000}, "--cpu-threads 1000: this process may use "),
        ({"device": "cuda", "cpu_threads": 1}, "--cpu-threads 1: ignored with --device cuda"),
    ],
    ids=str,
)
def test_what_counts_on_the_other_device_only_is_named(values, line, monkeypatch, caplog):
    monkeypatch.setattr(basic_hook, "has_nvidia_driver", lambda: True)
    with caplog.at_level(logging.WARNING):
        basic_hook.handle_device(ServerArgs("m", **values))
    (message,) = caplog.messages
    assert message.startswith(line)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (
            {"disable_radix_cache": True, "mamba_track_interval": 64},
            "--mamba-track-interval 64: no effect with --disable-radix-cache",
        ),
        (
            {"disable_radix_cache": True, "schedule_policy": "lpm"},
            "--schedule-policy lpm: no effect with --disable-radix-cache",
        ),
        (
            {"skip_tokenizer_init": True, "reasoning_parser": "qwen3"},
            "--reasoning-parser qwen3: no effect with --skip-tokenizer-init",
        ),
        (
            {"max_mamba_cache_size": 50, "mamba_full_memory_ratio": 0.5},
            "--mamba-full-memory-ratio 0.5: no effect with --max-mamba-cache-size",
        ),
        (
            {"enable_hierarchical_cache": True, "hicache_size": 1.0, "hicache_ratio": 3.0},
            "--hicache-ratio 3.0: no effect with --hicache-size",
        ),
        ({"disable_radix_cache": True, "max_mamba_cache_size": 50}, None),
        ({"mamba_track_interval": 64, "hicache_ratio": 2.0}, None),
    ],
    ids=str,
)
def test_flags_that_another_one_makes_idle_are_named(values, line, model, caplog):
    """Catches a number that is taken and read by nothing."""
    with caplog.at_level(logging.WARNING):
        run_resolution_pipeline(cpu_args(model, **values))
    assert caplog.messages == ([] if line is None else [line])


@pytest.mark.parametrize(
    ("there", "values", "refused"),
    [
        (2, {"base_gpu_id": 1}, False),
        (2, {"base_gpu_id": 2}, True),
        (2, {"base_gpu_id": 1, "dp_size": 2}, True),
        (2, {"dp_size": 2}, False),
        (None, {"base_gpu_id": 7}, False),
    ],
    ids=str,
)
def test_gpus_that_are_not_there_are_refused(there, values, refused, monkeypatch):
    monkeypatch.setattr(basic_hook, "has_nvidia_driver", lambda: True)
    monkeypatch.setattr(basic_hook, "num_visible_gpus", lambda: there)
    args = ServerArgs("m", device="cuda", **values)
    if not refused:
        assert basic_hook.handle_device(args).device == "cuda"
        return
    with pytest.raises(ValueError, match=r"needs [34] GPUs, 2 are visible to this process"):
        basic_hook.handle_device(args)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
