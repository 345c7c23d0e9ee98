"""The flat record: one declaration per flag, the same value from every way in."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re

import pytest

from sglang.srt.arg_groups.field_order import POSITIONAL_FIELD_ORDER, full_field_order
from sglang.srt.arg_groups.flag import flags_of
from sglang.srt.arg_groups.not_in_this_build import NOT_IN_THIS_BUILD, is_offered
from sglang.srt.arg_groups.pipeline import run_resolution_pipeline
from sglang.srt.server_args import GROUPS, ServerArgs, prepare_server_args
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.repo import ROOT

register_cpu_ci(est_time=3, suite="unit")

ACCEPTED_FOR_OLD_COMMAND_LINES = ("enable_metrics", "trust_remote_code")


def test_every_field_is_declared_in_exactly_one_group():
    in_groups = [flag.name for _, group in GROUPS for flag in flags_of(group)]
    assert len(in_groups) == len(set(in_groups))
    assert set(in_groups) == {field.name for field in dataclasses.fields(ServerArgs)}


def test_defaults_of_the_command_line_are_those_of_the_record():
    assert prepare_server_args(["--model-path", "m"]) == ServerArgs("m")


def test_every_flag_can_be_given():
    samples = {int: "3", float: "0.5", str: "text"}
    for flag in ServerArgs.flags():
        words = ["--model-path", "m"]
        if flag.name == "model_path":
            continue
        words += [flag.spelling] if flag.type is bool else [flag.spelling, samples[flag.type]]
        value = vars(prepare_server_args(words))[flag.name]
        expected = True if flag.type is bool else flag.type(samples[flag.type])
        assert value == ([expected] if flag.is_list else expected), flag.spelling


def test_positional_order_is_fixed_and_new_fields_come_last():
    order = full_field_order(ServerArgs)
    assert order[: len(POSITIONAL_FIELD_ORDER)] == POSITIONAL_FIELD_ORDER
    assert sorted(order) == sorted(field.name for field in dataclasses.fields(ServerArgs))
    args = ServerArgs("m", "t", True, "dummy")
    assert (args.tokenizer_path, args.skip_tokenizer_init, args.load_format) == ("t", True, "dummy")
    with pytest.raises(TypeError, match="model_path"):
        ServerArgs("m", model_path="n")


def test_command_line_wins_over_the_file(tmp_path):
    config = tmp_path / "server.yaml"
    config.write_text(
        "model-path: m\nport: 1234\nlog_level: debug\nlog-requests: true\n"
        "enable-metrics: false\ncuda-graph-bs: [1, 2]\napi-key: null\n"
    )
    args = prepare_server_args(["--config", str(config), "--port", "4321"])
    assert args == ServerArgs(
        "m", port=4321, log_level="debug", log_requests=True, cuda_graph_bs=[1, 2]
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modelpath: m", "modelpath is not a server argument"),
        ("- model-path", "must hold names and values"),
        ("a: [", "is not YAML"),
        ("log-requests: maybe", "log-requests must be true or false"),
    ],
)
def test_wrong_files_are_refused_by_name(text, message, tmp_path):
    config = tmp_path / "server.yaml"
    config.write_text(text)
    with pytest.raises(ValueError, match=message):
        prepare_server_args(["--config", str(config)])


def test_missing_file_and_missing_model_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"absent\.yaml: cannot be read"):
        prepare_server_args(["--config", str(tmp_path / "absent.yaml")])
    with pytest.raises(ValueError, match="--model-path is needed"):
        prepare_server_args([])


def test_abbreviations_are_refused(capsys):
    with pytest.raises(SystemExit):
        prepare_server_args(["--model-path", "m", "--enable-linear-lossless"])
    assert "unrecognized arguments" in capsys.readouterr().err


def test_foreign_launchers_can_add_and_read_our_flags():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-parallel-size", type=int, default=1)
    ServerArgs.add_cli_args(parser)
    namespace = parser.parse_args(["--model-path", "m", "--host", "::1", "--port", "7"])
    args = ServerArgs.from_cli_args(namespace)
    assert (args.tp_size, args.dp_size, args.base_gpu_id, args.grpc_mode) == (1, 1, 0, False)
    assert args.url() == "http://[::1]:7"


def test_url_of_any_address_is_reachable_from_here():
    assert ServerArgs("m", host="0.0.0.0", port=1).url() == "http://127.0.0.1:1"


def test_help_shows_only_what_can_work(capsys):
    with pytest.raises(SystemExit):
        prepare_server_args(["--help"])
    shown = capsys.readouterr().out
    for flag in ServerArgs.flags():
        assert (f"{flag.spelling} " in shown or f"{flag.spelling}\n" in shown) == is_offered(flag)
    for value in NOT_IN_THIS_BUILD["speculative_algorithm"].values:
        assert value not in shown.split("--speculative-algorithm")[1].split("\n")[0]


def test_what_is_missing_names_real_fields_with_a_way_out():
    names = {flag.name for flag in ServerArgs.flags()}
    for name, missing in NOT_IN_THIS_BUILD.items():
        assert name in names
        assert len(missing.sentence.split()) >= 4, name


def test_no_offered_flag_is_accepted_and_then_ignored():
    sources = [
        path.read_text(encoding="utf-8")
        for path in (ROOT / "python" / "sglang").rglob("*.py")
        if "fields" not in path.parts and path.name != "not_in_this_build.py"
    ]
    text = "\n".join(sources)
    ignored = [
        flag.spelling
        for flag in ServerArgs.flags()
        if is_offered(flag)
        and flag.name not in ACCEPTED_FOR_OLD_COMMAND_LINES
        and re.search(rf"\b{flag.name}\b", text) is None
    ]
    assert ignored == []


def test_resolved_record_travels_as_json_and_is_read_only():
    resolved = run_resolution_pipeline(ServerArgs("dummy", port=5))
    copy = ServerArgs.from_resolved_dict(json.loads(json.dumps(resolved.to_dict())))
    assert copy == resolved and copy.is_resolved
    with pytest.raises(AttributeError, match="--port cannot become 6"):
        copy.port = 6
    assert copy.port == 5
    with pytest.raises(ValueError, match="not a server argument: colour"):
        ServerArgs.from_resolved_dict({"model_path": "m", "colour": 1})


def test_unresolved_record_can_be_changed():
    args = ServerArgs("m")
    args.port = 6
    assert args.port == 6 and not args.is_resolved


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
