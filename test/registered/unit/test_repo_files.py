"""Files of the repository that no code imports: packaging, workflows, hooks, generated pages."""

from __future__ import annotations

import html.parser
import re
import tomllib

import pytest
import yaml

from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.repo import ROOT, load_script

register_cpu_ci(est_time=5, suite="unit")

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def make_targets() -> set[str]:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z][a-z-]*):", text, re.MULTILINE))


def test_distribution_and_import_names():
    project = pyproject()["project"]
    assert project["name"] == "sglang-lossless"
    assert project["scripts"] == {"sglang": "sglang.cli.main:main"}
    assert project["requires-python"] == ">=3.11"
    assert {"cuda", "test", "dev", "grammar", "hf", "plot", "nixl", "mooncake"} <= set(
        project["optional-dependencies"]
    )


def test_every_file_of_the_package_is_packaged():
    patterns = pyproject()["tool"]["setuptools"]["package-data"]["sglang"]
    package = ROOT / "python" / "sglang"
    packaged = {path for pattern in patterns for path in package.glob(pattern)}
    left_out = [
        str(path.relative_to(package))
        for path in package.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc") and path not in packaged
    ]
    assert left_out == []


def test_core_stays_free_of_heavy_packages():
    names = {re.split(r"[<>=;\[ ]", d)[0] for d in pyproject()["project"]["dependencies"]}
    assert names.isdisjoint({"transformers", "triton", "matplotlib", "xgrammar", "llguidance"})


def test_constraints_satisfy_the_declared_ranges():
    from packaging.requirements import Requirement

    pins = dict(
        line.lower().replace("_", "-").split("==")
        for line in (ROOT / "scripts" / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    project = pyproject()["project"]
    declared = [*project["dependencies"], *sum(project["optional-dependencies"].values(), [])]
    checked = 0
    for text in declared:
        requirement = Requirement(text)
        pin = pins.get(requirement.name.lower().replace("_", "-"))
        if pin is not None:
            assert requirement.specifier.contains(pin), f"{text} against {pin}"
            checked += 1
    assert checked >= 15


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.name)
def test_workflows_pin_actions_and_run_make(path):
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    ran = []
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] > 0
        for step in job["steps"]:
            if "uses" in step:
                assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step["uses"]), step["uses"]
            ran += re.findall(r"^make ([a-z-]+)", step.get("run", ""))
    assert set(ran) <= make_targets()
    assert ran or path.name == "pre-commit.yml"


def test_lanes_for_cpu_cuda_and_amd():
    assert {"cpu.yml", "cuda.yml", "amd.yml", "pre-commit.yml"} <= {p.name for p in WORKFLOWS}


def test_hooks_are_local_and_install_only_packages():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    for repo in config["repos"]:
        assert repo["repo"] == "local"
        assert all(hook["language"] == "python" for hook in repo["hooks"])


def test_ci_runs_make_test():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "set -euo pipefail" in script and script.rstrip().endswith("make test")


def test_licence_is_whole():
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text
    assert len(text.splitlines()) > 195


def test_readme_says_that_it_replaces_stock_sglang():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "replaces stock SGLang" in text
    assert "make demo" in text and "make test" in text
    targets = re.findall(r"\]\(((?!http)[^)#]+)\)", text)
    assert [t for t in targets if not (ROOT / t).exists()] == []


class _Cells(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self._in_cell = False

    def handle_starttag(self, tag, attrs):
        if tag == "tr":
            self.rows.append([])
        if tag == "td":
            self.rows[-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag):
        if tag == "td":
            self._in_cell = False

    def handle_data(self, data):
        if self._in_cell:
            self.rows[-1][-1] += data


def documented_flags(page: str) -> list[str]:
    parser = _Cells()
    parser.feed(page)
    rows = [row for row in parser.rows if row]
    assert all(len(row) == 4 and all(row) for row in rows)
    return [row[0] for row in rows]


def test_every_flag_has_one_row_and_no_row_is_stale():
    page = load_script("scripts/generate_server_arguments.py").PAGE.read_text(encoding="utf-8")
    expected = [flag.spelling for flag in ServerArgs.flags()] + ["--config"]
    assert sorted(documented_flags(page)) == sorted(expected)


def test_generated_page_is_up_to_date():
    generator = load_script("scripts/generate_server_arguments.py")
    assert generator.PAGE.read_text(encoding="utf-8") == generator.render()


def test_make_knows_the_promised_targets():
    assert {"demo", "test", "check", "format", "lint", "types", "gates", "unit"} <= make_targets()


def test_pages_name_only_make_targets_that_exist():
    for page in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert set(re.findall(r"`?make ([a-z-]+)", text)) <= make_targets(), page


def test_every_test_file_is_registered():
    runner = load_script("test/run_suite.py")
    registered = {test.filename for test in runner.collect_tests(runner.find_files())}
    assert registered == set(runner.find_files())


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
