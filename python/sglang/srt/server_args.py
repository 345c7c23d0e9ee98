"""The arguments of a server: one flat record, read from the command line, a file or Python.

Parsing only. What values mean together is decided once by `run_resolution_pipeline`
(`arg_groups/pipeline.py`); the record that it returns refuses assignment. Imports no torch.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from sglang.srt.arg_groups.field_order import POSITIONAL_FIELD_ORDER, positional_order
from sglang.srt.arg_groups.fields.disaggregation import DisaggregationFields
from sglang.srt.arg_groups.fields.exec_ import DeterministicFields, KernelFields, MambaFields
from sglang.srt.arg_groups.fields.memory import MemoryFields
from sglang.srt.arg_groups.fields.model import ModelFields
from sglang.srt.arg_groups.fields.parallel import ParallelFields
from sglang.srt.arg_groups.fields.schedule import ScheduleFields
from sglang.srt.arg_groups.fields.serving import ServingFields
from sglang.srt.arg_groups.fields.speculative import SpeculativeFields
from sglang.srt.arg_groups.flag import Flag, flags_of, spell
from sglang.srt.arg_groups.not_in_this_build import is_offered, offered_choices
from sglang.srt.speculative.adaptive import AdaptiveConfig

GROUPS: tuple[tuple[str, type], ...] = (
    ("Model", ModelFields),
    ("HTTP server", ServingFields),
    ("Scheduling", ScheduleFields),
    ("Memory and prefix cache", MemoryFields),
    ("Speculative decoding", SpeculativeFields),
    ("Recurrent layers", MambaFields),
    ("Attention and graphs", KernelFields),
    ("Determinism", DeterministicFields),
    ("Devices", ParallelFields),
    ("Prefill/decode disaggregation", DisaggregationFields),
)


@positional_order(POSITIONAL_FIELD_ORDER)
@dataclass
class ServerArgs(
    DisaggregationFields,
    ParallelFields,
    DeterministicFields,
    KernelFields,
    MambaFields,
    SpeculativeFields,
    MemoryFields,
    ScheduleFields,
    ServingFields,
    ModelFields,
):
    """Every argument of a server. Only `model_path` has no default.

    A record as given holds None or "auto" where the user left the choice to us; after
    `run_resolution_pipeline` those are decided, `is_resolved` is True and assignment raises.
    """

    @property
    def is_resolved(self) -> bool:
        """Whether this record came out of the resolution pipeline."""
        return bool(self.__dict__.get("_resolved", False))

    def mark_resolved(self) -> None:
        """Make the record read-only. Called by the resolution pipeline alone."""
        self.__dict__["_resolved"] = True

    def __setattr__(self, name: str, value: Any) -> None:
        if self.is_resolved:
            raise AttributeError(
                f"server arguments are read-only once resolved; {spell(name)} cannot become "
                f"{value!r}. Give the value at start."
            )
        object.__setattr__(self, name, value)

    @classmethod
    def flags(cls) -> tuple[Flag, ...]:
        """Declarations of all fields, in the order of the groups in --help."""
        return _all_flags()

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """Add every flag to a parser, in groups. Flags that cannot work are read but not shown."""
        for title, group in GROUPS:
            section = parser.add_argument_group(title)
            for flag in flags_of(group):
                _add_flag(section, flag)
        parser.add_argument(
            "--config",
            metavar="FILE",
            help="YAML file with arguments (model-path: ..., port: ...). Flags on the command line "
            "win over it.",
        )

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> ServerArgs:
        """The record of a namespace that was parsed with `add_cli_args`; not yet resolved."""
        given = vars(args)
        if given.get("model_path") is None:
            raise ValueError("--model-path is needed: a checkpoint's directory, or demo")
        return cls(**{flag.name: given[flag.name] for flag in cls.flags() if flag.name in given})

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, as plain values that JSON can hold."""
        return {flag.name: getattr(self, flag.name) for flag in self.flags()}

    @classmethod
    def from_resolved_dict(cls, values: Mapping[str, Any]) -> ServerArgs:
        """The read-only record that another process resolved and sent as `to_dict()`.

        Raises: ValueError naming a key that is no argument.
        """
        known = {flag.name for flag in cls.flags()}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"not a server argument: {', '.join(unknown)}")
        record = cls(**values)
        record.mark_resolved()
        return record

    def url(self) -> str:
        """Address at which this machine reaches the server."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def max_speculative_num_draft_tokens(self) -> int | None:
        """Largest number of verify rows per request that any step can have; pools are built for it.

        With `speculative_adaptive` it is the width of the largest candidate. None without
        speculation.
        """
        if not self.is_speculative:
            return None
        rows = self.speculative_num_draft_tokens
        if rows is None or not self.speculative_adaptive:
            return rows
        return max(rows, 1 + AdaptiveConfig.load(self.speculative_adaptive_config).union[-1])


@lru_cache(maxsize=1)
def _all_flags() -> tuple[Flag, ...]:
    return tuple(flag for _, group in GROUPS for flag in flags_of(group))


def _default_in_words(flag: Flag) -> str:
    if flag.spec.auto:
        return flag.spec.auto
    if flag.default is dataclasses.MISSING:
        return "needed"
    return str(flag.default)


def _add_flag(section: argparse._ArgumentGroup, flag: Flag) -> None:
    help_text = argparse.SUPPRESS
    if is_offered(flag):
        help_text = flag.spec.help.replace("%", "%%")
        if flag.type is not bool:
            help_text += f" (default: {_default_in_words(flag).replace('%', '%%')})"
    if flag.type is bool:
        section.add_argument(flag.spelling, action="store_true", dest=flag.name, help=help_text)
        return
    choices = offered_choices(flag)
    metavar = "{" + ",".join(choices) + "}" if choices else flag.spec.metavar
    section.add_argument(
        flag.spelling,
        dest=flag.name,
        type=flag.type,
        nargs="+" if flag.is_list else None,
        default=None if flag.default is dataclasses.MISSING else flag.default,
        metavar=metavar or flag.type.__name__.upper(),
        help=help_text,
    )


def _argv_of_file(path: str) -> list[str]:
    """Command-line words that say what a YAML file says.

    Raises: ValueError naming the file and what is wrong with it.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--config {path}: cannot be read ({error.strerror})") from error
    except yaml.YAMLError as error:
        raise ValueError(f"--config {path}: is not YAML ({error})") from error
    if content is None:
        return []
    if not isinstance(content, dict):
        raise ValueError(f"--config {path}: must hold names and values (model-path: DIR)")
    known = {flag.name: flag for flag in _all_flags()}
    words: list[str] = []
    for key, value in content.items():
        flag = known.get(str(key).replace("-", "_"))
        if flag is None:
            raise ValueError(f"--config {path}: {key} is not a server argument")
        if flag.type is bool and not isinstance(value, bool):
            raise ValueError(f"--config {path}: {key} must be true or false, got {value!r}")
        if value is None or value is False:
            continue
        words.append(flag.spelling)
        if value is not True:
            words += [str(v) for v in (value if isinstance(value, list) else [value])]
    return words


def prepare_server_args(argv: Sequence[str]) -> ServerArgs:
    """Read command-line words (without the program's name) and the file that --config names.

    The result is not resolved. A word that cannot be read prints usage and exits with status 2.
    Raises: ValueError for an unreadable --config file or a missing --model-path.
    """
    parser = argparse.ArgumentParser(
        prog="python -m sglang.launch_server",
        description="Serve a hybrid Gated-DeltaNet model over HTTP.",
        allow_abbrev=False,
    )
    ServerArgs.add_cli_args(parser)
    config = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    config.add_argument("--config")
    path = config.parse_known_args(argv)[0].config
    from_file = _argv_of_file(path) if path is not None else []
    return ServerArgs.from_cli_args(parser.parse_args([*from_file, *argv]))
