"""The `sglang` command; each subcommand is imported only when it is called."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """`module:function(argv) -> int | None`, and what it does in a few words."""

    target: str
    help: str

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def exists(self) -> bool:
        """Whether this build has it."""
        try:
            return importlib.util.find_spec(self.module) is not None
        except ModuleNotFoundError:
            return False

    def run(self, argv: Sequence[str]) -> int:
        """Run it; return the exit code."""
        module, _, name = self.target.partition(":")
        code = vars(importlib.import_module(module))[name](list(argv))
        return int(code or 0)


COMMANDS = {
    "serve": Command("sglang.launch_server:main", "start a server"),
    "plan": Command("sglang.srt.mem_cache.plan_cli:main", "show what a model needs of a device"),
    "parity": Command("sglang.parity.cli:main", "compare outputs of two configurations"),
    "version": Command("sglang.cli.version:main", "print the version"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `sglang` script."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in ("--version", "-V"):
        words = ["version"]
    known = {name: command for name, command in COMMANDS.items() if command.exists}
    if not words or words[0] in ("-h", "--help"):
        print(_usage(known))
        return 0 if words else 2
    command = known.get(words[0])
    if command is None:
        print(f"error: no command {words[0]!r}\n{_usage(known)}", file=sys.stderr)
        return 2
    return command.run(words[1:])


def _usage(known: dict[str, Command]) -> str:
    lines = [f"  {name:<9} {command.help}" for name, command in known.items()]
    return "\n".join(
        ["usage: sglang COMMAND [arguments]", "", *lines, "", "sglang COMMAND --help tells more."]
    )


if __name__ == "__main__":
    sys.exit(main())
