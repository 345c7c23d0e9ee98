"""Files for operators: they parse, and what they name exists."""

from __future__ import annotations

import argparse
import json
import re

import pytest
import yaml

from sglang.srt.managers.metrics import ServerMetrics
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.repo import ROOT

register_cpu_ci(est_time=5, suite="unit")

DEPLOY = ROOT / "deploy"
INSTRUCTIONS = {
    "FROM", "ARG", "RUN", "WORKDIR", "COPY", "USER", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK",
    "ENTRYPOINT", "CMD",
}  # fmt: skip
CLOSE_SECONDS = 10
"""What a server needs after its drain."""


def dockerfile() -> list[tuple[str, str]]:
    """(instruction, rest) of each line, continuations joined."""
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def parse_flags(flags: list[str]) -> ServerArgs:
    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    return ServerArgs.from_cli_args(parser.parse_args(flags))


def kubernetes() -> tuple[dict, dict]:
    documents = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8"))
    deployment, service = documents
    return deployment, service


def compose() -> dict:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))


def test_dockerfile_is_well_formed():
    """Catches an instruction that does not exist, or a file that is copied and is not there."""
    found = dockerfile()
    assert found[0][0] == "FROM" and {word for word, _ in found} <= INSTRUCTIONS
    kept = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    for word, rest in found:
        if word == "COPY":
            for name in rest.split()[:-1]:
                assert (ROOT / name).exists() and f"!{name.removeprefix('./')}" in kept
    last = dict(found)
    assert last["USER"] not in ("root", "0")
    entry, command = json.loads(last["ENTRYPOINT"]), json.loads(last["CMD"])
    assert entry[:3] == ["python", "-m", "sglang.launch_server"]
    args = parse_flags(entry[3:] + command)
    assert (args.host, str(args.port)) == ("0.0.0.0", last["EXPOSE"])
    check = json.loads(last["HEALTHCHECK"].partition("CMD ")[2])
    compile(check[2], "healthcheck", "exec")


def test_extras_of_the_image_exist():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for extras in re.findall(r"EXTRAS=([\w,]+)", (DEPLOY / "Dockerfile").read_text("utf-8")):
        for name in extras.split(","):
            assert re.search(rf"^{name} = \[", text, re.MULTILINE)


def test_kubernetes_manifest():
    """Catches flags that do not exist, a grace period below the drain, probes of other routes."""
    deployment, service = kubernetes()
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    args = parse_flags([str(flag) for flag in container["args"]])
    grace = pod["spec"]["terminationGracePeriodSeconds"]
    assert grace >= args.drain_timeout + CLOSE_SECONDS
    liveness = container["livenessProbe"]
    assert liveness["periodSeconds"] * liveness["failureThreshold"] > args.drain_timeout
    probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")]
    assert [probe["path"] for probe in probes] == ["/health", "/ready", "/health"]
    assert {probe["port"] for probe in probes} == {container["ports"][0]["name"]}
    labels = pod["metadata"]["labels"]
    assert service["spec"]["selector"] == labels
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}


def test_compose_file():
    """Catches flags that do not exist, and mounts of files that are not there."""
    services = compose()["services"]
    args = parse_flags(
        [re.sub(r"\$\{\w+:-(\w+)\}", r"\1", f) for f in services["sglang"]["command"]]
    )
    grace = int(services["sglang"]["stop_grace_period"].rstrip("s"))
    assert grace >= args.drain_timeout + CLOSE_SECONDS
    build = services["sglang"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()
    for service in services.values():
        assert set(service.get("depends_on", ())) <= set(services)
        for mount in service.get("volumes", ()):
            assert (DEPLOY / mount.split(":")[0]).is_file()
    scrape = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text("utf-8"))["scrape_configs"][0]
    host = scrape["static_configs"][0]["targets"][0].partition(":")[0]
    assert host in services and scrape["metrics_path"] == "/metrics"


def test_dashboard_names_metrics_that_exist():
    """Catches a panel that stays empty; the control is a name that no server has."""
    board = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text(encoding="utf-8"))
    source = yaml.safe_load((DEPLOY / "grafana" / "datasource.yaml").read_text("utf-8"))
    served = set(re.findall(r"^(sglang:\w+)\{", ServerMetrics("m").render().decode(), re.MULTILINE))
    named = set()
    for panel in board["panels"]:
        assert panel["datasource"]["uid"] == source["datasources"][0]["uid"]
        for target in panel["targets"]:
            assert target["expr"].count("(") == target["expr"].count(")")
            found = re.findall(r"sglang:\w+", target["expr"])
            assert found
            named.update(found)
    assert named <= served and "sglang:no_such_metric" not in served
    gauges = {name for name in served if not name.endswith(("_bucket", "_created", "_sum"))}
    shown = {name.removesuffix("_bucket") for name in named}
    assert {name.removesuffix("_count") for name in gauges} - shown == {"sglang:gen_throughput"}
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    places = {(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]}
    assert len(places) == len(ids)


def test_every_metric_is_documented():
    """Catches a metric without a line, or a line for one that no server has."""
    text = ServerMetrics("m").render().decode()
    served = {
        name + ("_total" if kind == "counter" else "")
        for name, kind in re.findall(r"^# TYPE (sglang:\w+) (\w+)", text, re.MULTILINE)
        if not name.endswith("_created")
    }
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    listed = re.findall(r"`(sglang:\w+)`", page)
    assert {name.replace("_total_total", "_total") for name in served} == set(listed)


@pytest.mark.parametrize("name", ["datasource.yaml", "provider.yaml"])
def test_grafana_provisioning(name):
    assert yaml.safe_load((DEPLOY / "grafana" / name).read_text("utf-8"))["apiVersion"] == 1


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
