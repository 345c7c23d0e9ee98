"""Resolving: what is left open is decided once; what cannot work is refused by name.

Mistakes these catch: a speculative number that is silently ignored, a default that is not shown,
a flag of a missing subsystem that is accepted, a front end that imports torch to find a device.
"""

from __future__ import annotations

import json
import logging

import pytest

from sglang.srt.arg_groups import basic_hook, pipeline
from sglang.srt.arg_groups.attention_hook import (
    handle_attention_backend,
    handle_linear_attn_backend,
    validate_linear_lossless_verify,
)
from sglang.srt.arg_groups.mamba_hook import handle_mamba_radix_cache
from sglang.srt.arg_groups.not_in_this_build import NOT_IN_THIS_BUILD
from sglang.srt.arg_groups.pipeline import STEPS, run_resolution_pipeline
from sglang.srt.arg_groups.speculative_hook import effective_topk, handle_speculative_decoding
from sglang.srt.runtime_context import get_context, get_exec, get_memory, publish
from sglang.srt.server_args import ServerArgs
from sglang.test.args_fixtures import MAX_POSITIONS, cpu_args, write_model_config
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit")


@pytest.fixture
def model(tmp_path) -> str:
    return write_model_config(tmp_path / "model")


def numbers(args: ServerArgs) -> tuple:
    return (
        args.speculative_num_steps,
        args.speculative_eagle_topk,
        args.speculative_num_draft_tokens,
    )


def spec(algorithm: str = "NEXTN", **values) -> ServerArgs:
    return cpu_args(
        speculative_algorithm=algorithm, **{f"speculative_{k}": v for k, v in values.items()}
    )


def test_defaults_on_the_cpu(model):
    args = run_resolution_pipeline(cpu_args(model))
    assert args.is_resolved
    assert (args.device, args.dtype, args.kv_cache_dtype) == ("cpu", "float32", "float32")
    assert args.attention_backend == "torch_native" and args.disable_cuda_graph
    assert (args.page_size, args.mamba_track_interval) == (64, 256)
    assert args.mamba_radix_cache_strategy == "extra_buffer"
    assert args.context_length == MAX_POSITIONS
    assert args.served_model_name == args.tokenizer_path == model
    assert args.random_seed is not None and args.cpu_threads >= 1
    assert args.max_speculative_num_draft_tokens() is None


def test_defaults_on_a_gpu(model, monkeypatch):
    monkeypatch.setattr(basic_hook, "has_nvidia_driver", lambda: True)
    args = run_resolution_pipeline(ServerArgs(model, max_running_requests=20))
    assert (args.device, args.dtype, args.attention_backend) == ("cuda", "bfloat16", "triton")
    assert args.chunked_prefill_size == 8192
    assert args.cuda_graph_max_bs == 20 and args.cuda_graph_bs[-1] == 20
    assert args.cuda_graph_bs == sorted(set(args.cuda_graph_bs))


def test_resolving_changes_nothing_in_the_record_passed_in(model):
    given = cpu_args(model)
    resolved = run_resolution_pipeline(given)
    assert given == cpu_args(model) and not given.is_resolved
    assert run_resolution_pipeline(resolved) is resolved
    with pytest.raises(AttributeError, match="read-only"):
        resolved.page_size = 1


def test_placeholder_model_leaves_early_but_values_are_checked():
    args = run_resolution_pipeline(cpu_args("none", enable_linear_lossless_verify=True))
    assert args.is_resolved and args.page_size is None
    with pytest.raises(ValueError, match="--port must be at least 0 and at most 65535, got -1"):
        run_resolution_pipeline(cpu_args("dummy", port=-1))


def test_lossless_verify_is_checked_after_speculation():
    assert STEPS.index(validate_linear_lossless_verify) > STEPS.index(handle_speculative_decoding)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"port": 70000}, "--port must be at least 0 and at most 65535, got 70000"),
        ({"port": "80"}, "--port must be of type int, got '80'"),
        ({"port": True}, "--port must be of type int, got True"),
        ({"log_requests": 1}, "--log-requests must be of type bool, got 1"),
        ({"mem_fraction_static": 1.0}, "--mem-fraction-static must be above 0 and below 1"),
        ({"mem_fraction_static": float("nan")}, "--mem-fraction-static must be"),
        ({"max_running_requests": 0}, "--max-running-requests must be at least 1, got 0"),
        ({"schedule_policy": "luck"}, "--schedule-policy luck is not known; use one of fcfs, lpm"),
        ({"cuda_graph_bs": [1, 0]}, "--cuda-graph-bs must be at least 1 and at most 65536, got 0"),
        ({"cuda_graph_bs": 4}, "--cuda-graph-bs must be a list, got 4"),
        ({"chunked_prefill_size": 0}, "--chunked-prefill-size 0 computes nothing"),
        ({"context_length": MAX_POSITIONS + 1}, f"--context-length {MAX_POSITIONS + 1} is beyond"),
        ({"quantization": "fp8"}, "--quantization fp8: the weights .* are not quantized"),
        ({"dtype": "float16"}, "--dtype float16 is for GPUs"),
        (
            {"attention_backend": "triton"},
            "--attention-backend triton does not run on --device cpu",
        ),
        ({"linear_attn_backend": "flashinfer"}, "--linear-attn-backend flashinfer: .* use triton"),
        ({"page_size": 48}, "--mamba-track-interval 256 must be a multiple of --page-size 48"),
        (
            {"mamba_radix_cache_strategy": "no_buffer", "page_size": 16},
            "no_buffer needs --page-size 1, got 16",
        ),
        (
            {"mamba_radix_cache_strategy": "extra_buffer", "disable_radix_cache": True},
            "--mamba-radix-cache-strategy extra_buffer needs the prefix cache",
        ),
        (
            {"hicache_ratio": 3.0},
            "--hicache-ratio 3.0 needs --enable-hierarchical-cache",
        ),
        (
            {"enable_hierarchical_cache": True, "disable_radix_cache": True},
            "--enable-hierarchical-cache keeps what the prefix cache evicts",
        ),
        (
            {"enable_hierarchical_cache": True, "hicache_storage_dir": "d"},
            "--hicache-storage-dir d needs --hicache-storage-backend file",
        ),
        ({"linear_lossless_commit": "deferred"}, "--linear-lossless-commit deferred"),
        ({"grpc_mode": True}, "--grpc-mode: gRPC is not served"),
        (
            {"speculative_ngram_capacity": 9},
            "--speculative-ngram-capacity 9 needs --speculative-algorithm",
        ),
        (
            {"speculative_use_rejection_sampling": True},
            "--speculative-use-rejection-sampling needs --speculative-algorithm",
        ),
        (
            {"speculative_algorithm": "NEXTN", "speculative_dflash_block_size": 8},
            "--speculative-dflash-block-size 8 is for --speculative-algorithm DFLASH, got NEXTN",
        ),
        (
            {"speculative_algorithm": "NGRAM", "speculative_draft_model_path": "d"},
            "--speculative-draft-model-path d is for .* got NGRAM",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_refused_by_name(values, message, model):
    with pytest.raises(ValueError, match=message):
        run_resolution_pipeline(cpu_args(model, **values))


@pytest.mark.parametrize(("device", "backend"), [("cpu", "flashinfer"), ("cuda", "torch_native")])
@pytest.mark.parametrize("phase", ["", "decode_", "prefill_", "verify_"])
def test_kernels_of_the_other_device_are_refused(device, backend, phase):
    args = cpu_args(device=device, **{f"linear_attn_{phase}backend": backend})
    flag = f"--linear-attn-{phase}backend {backend}".replace("_b", "-b")
    with pytest.raises(ValueError, match=flag):
        handle_linear_attn_backend(args)
    handle_linear_attn_backend(cpu_args(device=device))


def test_attention_kernels_of_the_other_device_are_refused():
    args = cpu_args(device="cuda", attention_backend="torch_native")
    with pytest.raises(ValueError, match="torch_native does not run on --device cuda.*triton"):
        handle_attention_backend(args)


def test_a_gpu_that_is_not_there_is_refused(model, monkeypatch):
    monkeypatch.setattr(basic_hook, "has_nvidia_driver", lambda: False)
    monkeypatch.setattr(basic_hook, "has_amd_driver", lambda: False)
    with pytest.raises(ValueError, match="--device cuda: no GPU is visible"):
        run_resolution_pipeline(ServerArgs(model, device="cuda"))


def test_what_is_not_in_this_build_is_refused_by_name(model):
    samples = {int: 7, float: 7.5, bool: True, str: "x"}
    flags = {flag.name: flag for flag in ServerArgs.flags()}
    tried = 0
    for name, missing in NOT_IN_THIS_BUILD.items():
        flag = flags[name]
        value = [samples[flag.type]] if flag.is_list else samples[flag.type]
        if missing.values or flag.spec.choices:
            offered = missing.values or tuple(c for c in flag.spec.choices if c != flag.default)
            value = offered[0]
        elif flag.spec.maximum == 1:
            value = 0.5
        with pytest.raises(ValueError, match=flag.spelling):
            run_resolution_pipeline(cpu_args(model, **{name: value}))
        tried += 1
    assert tried == len(NOT_IN_THIS_BUILD) > 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"speculative_algorithm": "DSPARK"}, "--speculative-algorithm DSPARK: .* give"),
    ],
)
def test_what_does_not_go_together_in_this_build(values, message, model):
    with pytest.raises(ValueError, match=message):
        run_resolution_pipeline(cpu_args(model, **values))


class TestSpeculativeNumbers:
    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            ({}, (3, 1, 4)),
            ({"num_steps": 5}, (5, 1, 6)),
            ({"num_steps": 5, "eagle_topk": 1}, (5, 1, 6)),
            ({"num_steps": 2, "num_draft_tokens": 3}, (2, 1, 3)),
            ({"num_steps": 3, "eagle_topk": 4, "num_draft_tokens": 16}, (3, 4, 16)),
            ({"num_steps": 3, "eagle_topk": 2, "num_draft_tokens": 11}, (3, 2, 11)),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("algorithm", ["EAGLE", "NEXTN", "EAGLE3", "STANDALONE"])
    def test_subsets_that_start(self, given, expected, algorithm):
        assert numbers(handle_speculative_decoding(spec(algorithm, **given))) == expected

    @pytest.mark.parametrize(
        ("given", "named"),
        [
            ({"eagle_topk": 1}, "--speculative-eagle-topk 1 needs --speculative-num-steps"),
            ({"num_draft_tokens": 4}, "--speculative-num-draft-tokens 4 needs"),
            ({"eagle_topk": 4, "num_draft_tokens": 8}, "--speculative-eagle-topk 4 needs"),
            ({"num_steps": 3, "eagle_topk": 4}, "needs --speculative-num-draft-tokens between"),
            (
                {"num_steps": 3, "eagle_topk": 4, "num_draft_tokens": 3},
                "--speculative-num-draft-tokens 3 does not fit --speculative-num-steps 3",
            ),
            ({"num_steps": 3, "eagle_topk": 2, "num_draft_tokens": 12}, "give 4 to 11"),
        ],
        ids=str,
    )
    def test_subsets_that_are_refused(self, given, named):
        with pytest.raises(ValueError, match=named):
            handle_speculative_decoding(spec("EAGLE", **given))

    def test_a_chain_forces_its_width_with_a_warning(self, caplog):
        with caplog.at_level(logging.WARNING):
            args = handle_speculative_decoding(spec(num_steps=3, num_draft_tokens=9))
        assert numbers(args) == (3, 1, 4)
        assert "--speculative-num-draft-tokens 9 becomes 4" in caplog.text

    @pytest.mark.parametrize("name", ["num_steps", "eagle_topk", "num_draft_tokens"])
    def test_numbers_without_an_algorithm_are_refused(self, name):
        with pytest.raises(ValueError, match="needs --speculative-algorithm"):
            handle_speculative_decoding(cpu_args(**{f"speculative_{name}": 4}))

    def test_running_requests_default(self):
        assert handle_speculative_decoding(spec()).max_running_requests == 48
        given = cpu_args(speculative_algorithm="NEXTN", max_running_requests=7)
        assert handle_speculative_decoding(given).max_running_requests == 7
        assert handle_speculative_decoding(cpu_args()).max_running_requests is None

    def test_resolved_width_is_what_pools_are_built_for(self):
        args = handle_speculative_decoding(spec(num_steps=5))
        assert args.max_speculative_num_draft_tokens() == 6

    def test_adaptive_steps(self, tmp_path):
        args = handle_speculative_decoding(spec(adaptive=True))
        assert numbers(args) == (3, 1, 4)
        assert args.max_speculative_num_draft_tokens() == 8
        table = tmp_path / "table.json"
        table.write_text('{"candidate_steps": [2, 4, 9]}')
        args = handle_speculative_decoding(spec(adaptive=True, adaptive_config=str(table)))
        assert numbers(args) == (4, 1, 5)
        assert args.max_speculative_num_draft_tokens() == 10

    def test_adaptive_refuses_steps_that_it_cannot_choose(self):
        with pytest.raises(ValueError, match="--speculative-num-steps 6 is not among"):
            handle_speculative_decoding(spec(adaptive=True, num_steps=6))
        with pytest.raises(ValueError, match="-config needs --speculative-adaptive"):
            handle_speculative_decoding(spec(adaptive_config="x"))
        with pytest.raises(ValueError, match="--speculative-adaptive needs --speculative-algo"):
            handle_speculative_decoding(cpu_args(speculative_adaptive=True))

    def test_adaptive_falls_back_to_fixed_steps_with_a_warning(self, caplog):
        tree = {"num_steps": 3, "eagle_topk": 2, "num_draft_tokens": 6}
        with caplog.at_level(logging.WARNING):
            args = handle_speculative_decoding(spec("EAGLE", adaptive=True, **tree))
        assert not args.speculative_adaptive and args.max_speculative_num_draft_tokens() == 6
        assert "the number of steps is fixed" in caplog.text

    def test_ngram_names_numbers_that_it_derives(self, caplog):
        with caplog.at_level(logging.WARNING):
            args = handle_speculative_decoding(spec("NGRAM", num_steps=7, eagle_topk=2))
        assert numbers(args) == (1, 10, 12)
        assert "--speculative-num-steps 7 becomes 1" in caplog.text
        assert "--speculative-eagle-topk 2 becomes 10" in caplog.text

    def test_ngram(self):
        args = handle_speculative_decoding(spec("NGRAM"))
        assert numbers(args) == (1, 10, 12) and effective_topk(args) == 10
        with pytest.raises(ValueError, match="min-bfs-breadth 11 is above"):
            handle_speculative_decoding(spec("NGRAM", ngram_min_bfs_breadth=11))

    @pytest.mark.parametrize(
        ("algorithm", "given", "rows"),
        [
            ("DFLASH", {}, 8),
            ("DFLASH", {"num_draft_tokens": 6}, 6),
            ("DFLASH", {"dflash_block_size": 4}, 4),
            ("DFLASH", {"num_steps": 9, "eagle_topk": 4}, 8),
            ("DSPARK", {}, 9),
            ("DSPARK", {"num_draft_tokens": 8}, 8),
            ("DSPARK", {"dspark_block_size": 7}, 8),
        ],
        ids=str,
    )
    def test_block_drafters_pin_one_chain(self, algorithm, given, rows, monkeypatch, caplog):
        from sglang.srt.arg_groups import speculative_hook

        class Draft:
            block_size = 8

            @staticmethod
            def from_path(path):
                return Draft

        monkeypatch.setattr(speculative_hook, "DraftConfig", Draft)
        with caplog.at_level(logging.WARNING):
            args = handle_speculative_decoding(spec(algorithm, draft_model_path="d", **given))
        assert numbers(args) == (1, 1, rows)
        assert ("becomes 1" in caplog.text) == ("eagle_topk" in given)

    def test_block_drafters_refuse_two_different_widths(self, monkeypatch):
        from sglang.srt.arg_groups import speculative_hook

        monkeypatch.setattr(
            speculative_hook, "DraftConfig", type("D", (), {"from_path": lambda p: D8})
        )
        with pytest.raises(ValueError, match="--speculative-dflash-block-size 4 means 4"):
            handle_speculative_decoding(
                spec("DFLASH", draft_model_path="d", dflash_block_size=4, num_draft_tokens=6)
            )

    def test_block_drafters_need_their_model(self, model, tmp_path):
        with pytest.raises(ValueError, match="DFLASH needs --speculative-draft-model-path"):
            handle_speculative_decoding(spec("DFLASH"))
        with pytest.raises(ValueError, match="DSPARK needs --speculative-draft-model-path"):
            handle_speculative_decoding(cpu_args(model, speculative_algorithm="DSPARK"))
        bundled = tmp_path / "bundled"
        bundled.mkdir()
        (bundled / "config.json").write_text(json.dumps({"dspark_block_size": 5}))
        args = cpu_args(str(bundled), speculative_algorithm="DSPARK")
        assert numbers(handle_speculative_decoding(args)) == (1, 1, 6)

    @pytest.mark.parametrize(
        ("flag", "given"),
        [
            ("use_rejection_sampling", {"num_steps": 2, "eagle_topk": 2, "num_draft_tokens": 4}),
            ("use_rejection_sampling", {"accept_threshold_acc": 0.9}),
            ("use_block_verification", {"accept_threshold_single": 0.9}),
        ],
    )
    def test_exact_accept_rules_need_an_exact_chain(self, flag, given):
        with pytest.raises(ValueError, match="leave it out"):
            handle_speculative_decoding(spec("EAGLE", **{flag: True}, **given))
        assert handle_speculative_decoding(spec("EAGLE", **{flag: True}))

    def test_a_checkpoint_without_a_draft_layer_is_refused(self, tmp_path):
        bare = write_model_config(tmp_path / "bare", mtp_num_hidden_layers=0)
        with pytest.raises(ValueError, match="has no multi-token-prediction layer"):
            run_resolution_pipeline(cpu_args(bare, speculative_algorithm="NEXTN"))


class D8:
    block_size = 8


class TestPrefixCacheStrategy:
    def resolve(self, **values) -> ServerArgs:
        return handle_mamba_radix_cache(cpu_args(**{"page_size": 64, **values}))

    @pytest.mark.parametrize(
        ("values", "strategy"),
        [
            ({}, "extra_buffer"),
            ({"disable_overlap_schedule": True}, "extra_buffer"),
            ({"page_size": 1}, "extra_buffer"),
            ({"page_size": 1, "disable_overlap_schedule": True}, "no_buffer"),
            ({"disable_radix_cache": True}, "no_buffer"),
            ({"mamba_radix_cache_strategy": "extra_buffer_lazy"}, "extra_buffer_lazy"),
        ],
        ids=str,
    )
    def test_choice(self, values, strategy):
        args = self.resolve(**values)
        assert args.mamba_radix_cache_strategy == strategy
        assert args.enable_mamba_extra_buffer == (strategy != "no_buffer")
        assert args.enable_mamba_extra_buffer_lazy == (strategy == "extra_buffer_lazy")
        assert args.mamba_full_memory_ratio == 0.9

    def test_no_buffer_turns_overlap_off(self):
        args = self.resolve(mamba_radix_cache_strategy="no_buffer", page_size=1)
        assert args.disable_overlap_schedule

    def test_gpu_kernels_that_cannot_track(self):
        on_gpu = {"device": "cuda", "linear_attn_backend": "flashinfer"}
        strategy = self.resolve(**on_gpu, page_size=1, disable_overlap_schedule=True)
        assert strategy.mamba_radix_cache_strategy == "no_buffer"
        with pytest.raises(ValueError, match="extra_buffer needs --linear-attn-backend triton"):
            self.resolve(**on_gpu, mamba_radix_cache_strategy="extra_buffer")

    def test_interval_holds_a_verify_step(self):
        with pytest.raises(ValueError, match="must be at least the 9 rows"):
            self.resolve(
                page_size=1,
                mamba_track_interval=8,
                speculative_algorithm="NEXTN",
                speculative_num_draft_tokens=9,
            )

    def test_lazy_does_not_go_with_disaggregation(self):
        with pytest.raises(ValueError, match="extra_buffer_lazy does not work with --disagg"):
            self.resolve(
                mamba_radix_cache_strategy="extra_buffer_lazy", disaggregation_mode="decode"
            )


def test_published_arguments_are_read_by_subject(monkeypatch):
    monkeypatch.setattr(get_context(), "_server_args", None)
    with pytest.raises(RuntimeError, match="no server arguments were published"):
        get_exec()
    publish(cpu_args(enable_linear_lossless_verify=True))
    assert get_exec().mamba.enable_linear_lossless_verify is True
    assert get_memory().disable_radix_cache is False
    with get_context().override(disable_radix_cache=True):
        assert get_memory().disable_radix_cache is True
    assert get_memory().disable_radix_cache is False


def test_a_step_may_only_check():
    args = cpu_args()
    assert pipeline.run_hook(lambda a: None, args) is args


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
