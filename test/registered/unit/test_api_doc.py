"""docs/api.md against the server's own description."""

from __future__ import annotations

import re

import msgspec
import pytest

from sglang.srt.arg_groups.pipeline import run_resolution_pipeline
from sglang.srt.entrypoints.front_end import FrontEnd
from sglang.srt.entrypoints.gatekeeper import GateState
from sglang.srt.entrypoints.http_io import NO_OPS
from sglang.srt.entrypoints.http_server import make_app
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.front_end_case import write_front_end_model
from sglang.test.repo import ROOT

register_cpu_ci(est_time=5, suite="unit")

PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
UNDESCRIBED = {("GET", "/")}
"""Routes for people, which the description leaves out."""


def first_cells(text: str) -> list[str]:
    rows = re.findall(r"^\| (.+?) \|", text, re.MULTILINE)
    return [name for cell in rows for name in re.findall(r"`([^`]+)`", cell)]


@pytest.fixture(scope="module")
def description(tmp_path_factory):
    model = write_front_end_model(tmp_path_factory.mktemp("model"))
    args = run_resolution_pipeline(ServerArgs(model_path=str(model), device="cpu"))
    return make_app(FrontEnd(args), GateState()).openapi()


def test_every_route_is_listed(description):
    """Catches a route without a line, or a line without a route."""
    served = {
        (method.upper(), path)
        for path, methods in description["paths"].items()
        for method in methods
    }
    listed = {tuple(name.split(" ", 1)) for name in first_cells(SECTIONS["Endpoints"])}
    assert listed == served | UNDESCRIBED


def test_every_option_is_listed(description):
    """Catches an option without a line, or a line for an option that does not exist."""
    schemas = description["components"]["schemas"]
    both = first_cells(SECTIONS["POST /v1/completions"].partition("both OpenAI routes")[2])
    seen = 0
    for path, methods in description["paths"].items():
        body = methods.get("post", {}).get("requestBody")
        if body is None or path in ("/v1/tokenize", "/v1/detokenize"):
            continue
        schema = body["content"]["application/json"]["schema"]
        options = set(schemas[schema["$ref"].rpartition("/")[2]]["properties"])
        text = SECTIONS[f"POST {path}"].partition("`sampling_params`:")[0]
        listed = first_cells(text)
        if path == "/v1/chat/completions":
            listed += both
        assert len(listed) == len(set(listed)), path
        assert set(listed) == options, path
        seen += 1
    assert seen == 9


def test_every_sampling_parameter_is_listed():
    listed = first_cells(SECTIONS["POST /generate"].partition("`sampling_params`:")[2])
    assert set(listed) == set(SamplingParams.__struct_fields__)
    assert len(listed) == len(msgspec.structs.fields(SamplingParams))


def test_every_option_without_effect_is_listed():
    line = next(line for line in PAGE.splitlines() if "`log_metrics`" in line)
    assert set(re.findall(r"`(\w+)`", line)) - {"false"} == NO_OPS


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
