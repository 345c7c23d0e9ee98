"""Does a command that the documentation shows exist, with the flags that it is given?"""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from sglang.cli.main import COMMANDS
from sglang.srt.arg_groups.flag import flags_of
from sglang.srt.arg_groups.not_in_this_build import is_offered
from sglang.srt.server_args import GROUPS

ROOT = Path(__file__).resolve().parent.parent
ROUTES = ROOT / "python" / "sglang" / "srt" / "entrypoints" / "routes.py"
SOURCES = ("", "python", "scripts", "benchmark")
OWN_PACKAGES = ("sglang", "benchmark", "examples")
ANYTHING = {"python3", "pip", "git", "export", "cd", "source", ".", "pre-commit", "docker", "ls"}
"""Commands of the system; their arguments are theirs."""
HELP = {"--help", "-h"}


class CommandError(ValueError):
    """A command that cannot work; the message shows it and says why."""


def check_commands(text: str) -> None:
    """Check every command of a block. Raises: CommandError for the first that cannot work."""
    for words in commands(text):
        _check(words)


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command, without prompts, comments, settings of variables and redirections."""
    joined = re.sub(r"\\\n\s*", " ", text)
    for line in joined.splitlines():
        line = line.strip().removeprefix("$ ")
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word and set(word) <= set("|&;"):
                if words:
                    yield words
                words = []
            elif not (not words and re.fullmatch(r"[A-Z_]+=.*", word)):
                words.append(word)


def _check(words: Sequence[str]) -> None:
    command, rest = words[0], list(words[1:])
    if command in ("python", "python3") and rest:
        _check_python(words, rest)
    elif command == "make":
        _check_make(words, rest)
    elif command == "sglang":
        _check_sglang(words, rest)
    elif command == "curl":
        _check_curl(words, rest)
    elif command not in ANYTHING:
        raise _wrong(words, f"the check does not know {command}")


def _wrong(words: Sequence[str], why: str) -> CommandError:
    return CommandError(f"{shlex.join(words)}: {why}")


def _flags(words: Sequence[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if word.startswith("--") and word != "--"]


def _require(words: Sequence[str], rest: Sequence[str], known: set[str]) -> None:
    unknown = [flag for flag in _flags(rest) if flag not in known | HELP]
    if unknown:
        raise _wrong(words, f"no flag {', '.join(unknown)}")


@cache
def server_flags() -> frozenset[str]:
    """Every flag that the server takes."""
    flags = [flag for _, group in GROUPS for flag in flags_of(group)]
    spelled = {flag.spelling for flag in flags if is_offered(flag)}
    return frozenset(spelled | {"--config"})


@cache
def flags_in_source(path: Path) -> frozenset[str]:
    """Every flag that a script names as a string."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= set(re.findall(r"--[a-z][a-z0-9-]*", node.value))
    return frozenset(found)


def _check_python(words: Sequence[str], rest: list[str]) -> None:
    if rest[0] == "-m" and len(rest) > 1:
        module = rest[1]
        if module.split(".")[0] not in OWN_PACKAGES:
            return
        path = _module_file(module)
        if path is None:
            raise _wrong(words, f"no module {module}")
        known = set(flags_in_source(path))
        if module in ("sglang.launch_server", "sglang.parity"):
            known |= server_flags()
        if module == "sglang.parity":
            known |= flags_in_source(path.parent / "cli.py")
        for beside in path.parent.glob("*.py") if path.stem == "__main__" else ():
            known |= flags_in_source(beside)
        _require(words, rest[2:], known)
    elif rest[0].endswith(".py"):
        path = ROOT / rest[0]
        if not path.is_file():
            raise _wrong(words, f"no file {rest[0]}")
        _require(words, rest[1:], set(flags_in_source(path)))


def _module_file(module: str) -> Path | None:
    """Source of a module; a package's `__main__` where it has one."""
    parts = module.split(".")
    for base in SOURCES:
        stem = ROOT.joinpath(base, *parts)
        for path in (stem / "__main__.py", stem.with_suffix(".py"), stem / "__init__.py"):
            if path.is_file():
                return path
    return None


def _check_make(words: Sequence[str], rest: Sequence[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.M))
    for word in rest:
        name, is_setting, _ = word.partition("=")
        if is_setting and not re.search(rf"^{name} *\??=", makefile, re.M):
            raise _wrong(words, f"the Makefile has no variable {name}")
        if not is_setting and word not in targets:
            raise _wrong(words, f"the Makefile has no target {word}")


def _check_sglang(words: Sequence[str], rest: Sequence[str]) -> None:
    if not rest or rest[0].startswith("-"):
        return
    if rest[0] not in COMMANDS:
        raise _wrong(words, f"no command {rest[0]}")
    target = COMMANDS[rest[0]]
    spec = importlib.util.find_spec(target.module)
    if spec is None or spec.origin is None:
        raise _wrong(words, f"{target.module} is missing")
    _require(words, rest[1:], set(flags_in_source(Path(spec.origin))) | set(server_flags()))


def _check_curl(words: Sequence[str], rest: Sequence[str]) -> None:
    is_route: Callable[[str], bool] = routes().__contains__
    for word in rest:
        if word.startswith("http"):
            path = urlsplit(word).path
            if not is_route(path):
                raise _wrong(words, f"the server has no route {path}")


@cache
def routes() -> frozenset[str]:
    """Every route that the server's sources name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(ROUTES.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.fullmatch(r"/[a-z0-9_/{}:]*", node.value):
                found.add(node.value)
    return frozenset(found | {f"/{name}" for name in ("server_info", "get_server_info")})
