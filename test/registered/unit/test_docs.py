"""The documentation holds, and its checks notice when it does not.

Mistakes caught: a page that names a flag, file, route or heading that is gone, an example that does
not print what it says, a picture of old figures, and a check that passes whatever it is given.
"""

from __future__ import annotations

import importlib
import sys

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.repo import ROOT

register_cpu_ci(est_time=20, suite="unit")


@pytest.fixture(scope="module", autouse=True)
def scripts_on_path():
    sys.path.insert(0, str(ROOT / "scripts"))
    yield
    sys.path.remove(str(ROOT / "scripts"))


def script(name):
    return importlib.import_module(name)


def test_every_page_holds():
    check = script("docs_check")
    problems = [problem for page in check.pages() for problem in check.check_page(page)]
    assert not problems, "\n".join(problems)
    assert len(check.pages()) > 20


def test_pictures_and_tables_show_todays_figures():
    for path, text in script("docs_drawings").contents().items():
        assert path.read_text("utf-8") == text, f"{path}: run `make docs-drawings`"


@pytest.mark.parametrize(
    "command",
    [
        "python -m sglang.launch_server --model-path demo --no-such-flag",
        "python -m sglang.no_such_module",
        "python benchmark/no_such_file.py",
        "python -m sglang.parity --model-path demo --shrot",
        "sglang frobnicate",
        "sglang plan --modle-path demo",
        "make no-such-target",
        "make test NO_SUCH=1",
        "curl http://127.0.0.1:30000/v1/no_such_route",
        "A=1 frobnicate --all",
        "make test && sglang parity --no-such",
    ],
)
def test_a_command_that_cannot_work_is_named(command):
    commands = script("docs_commands")
    with pytest.raises(commands.CommandError, match="no |not know"):
        commands.check_commands(command)


def test_a_command_over_several_lines_is_one():
    commands = script("docs_commands")
    text = "A=1 python -m sglang.launch_server \\\n    --model-path demo  # why\nmake test | make demo\n"
    assert list(commands.commands(text)) == [
        ["python", "-m", "sglang.launch_server", "--model-path", "demo"],
        ["make", "test"],
        ["make", "demo"],
    ]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[gone](no_such_page.md)", "does not exist"),
        ("[gone](index.md#no-such-heading)", "no such heading"),
        ("![gone](images/no_such.svg)", "does not exist"),
        ("```python\n>>> 1 + 1\n3\n\n```\n", "does not print"),
        ("```python\nif:\n```\n", "python block"),
        ("```json\n{'a': 1}\n```\n", "json block"),
        ("```bash\nmake nothing\n```\n", "no target"),
    ],
    ids=["link", "heading", "picture", "example", "python", "json", "command"],
)
def test_a_page_that_does_not_hold_is_named(text, why, monkeypatch, tmp_path):
    check = script("docs_check")
    page = ROOT / "docs" / "index.md"
    monkeypatch.setattr(type(page), "read_text", reading(page, text))
    (problem,) = check.check_page(page)
    assert why in problem and "docs/index.md" in problem


def reading(page, text):
    """`Path.read_text` that shows ``text`` in place of the page."""
    read = type(page).read_text

    def read_text(self, *args, **kwargs):
        return text if self == page else read(self, *args, **kwargs)

    return read_text


AUDIT = (
    "verify chain fp32                  sm_90         128  ptx 128 sass 128     exact, as it must be\n"
    "planted: one expression            sm_90         128  ptx 32 sass 32       not exact, as it must be\n"
)


def test_audit_table():
    audit = script("docs_audit")
    assert audit.table(AUDIT).splitlines()[2:] == [
        "| verify chain fp32 | 128/128 |",
        "| planted: one expression | 32/32 of 128 |",
    ]
    with pytest.raises(ValueError, match="failed"):
        audit.table(AUDIT.replace("exact, as it must be", "exact: WRONG", 1))
    with pytest.raises(ValueError, match="understood"):
        audit.table("")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
