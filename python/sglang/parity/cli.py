"""Command line of the parity tool; the exit status is the verdict: 0 equal, 1 different, 2 error."""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

from sglang.parity.client import (
    Client,
    NativeClient,
    OpenAIClient,
    ServerError,
    check_listening,
)
from sglang.parity.report import (
    NOT_COMPARED,
    VERDICTS,
    AlgorithmReport,
    overall,
    page,
    table,
)
from sglang.parity.runner import Job, run_pair, running, started
from sglang.parity.servers import LAUNCHER
from sglang.parity.workloads import WORKLOADS, Sizes
from sglang.srt.arg_groups.basic_hook import detect_device
from sglang.version import __version__

ALGORITHMS = ("EAGLE", "NEXTN", "DFLASH", "DSPARK")
"""Those that lossless verify serves; asked for before the first server starts."""

DEFAULT_ALGORITHM = "NEXTN"
LOSSLESS = "--enable-linear-lossless-verify"
NO_CACHE = "--disable-radix-cache"
BUNDLED_DRAFTS = {"DFLASH": "demo-dflash", "DSPARK": "demo-dspark"}
CHOSEN_HERE = {
    "--host": "the servers listen on this machine only",
    "--port": "each server gets a free port",
    "--speculative-algorithm": "give --algorithms",
    "--speculative-draft-model-path": "give --draft-model-path ALGORITHM=PATH",
    LOSSLESS: "one of the two servers gets it",
}
"""Server flags that the tool sets itself, and what to do instead."""


def build_parser() -> argparse.ArgumentParser:
    """The tool's own arguments; all others go to the servers."""
    parser = argparse.ArgumentParser(
        prog="sglang parity",
        allow_abbrev=False,
        description="Show that lossless verify gives the outputs of the default verify, bit for "
        "bit; or compare any two running servers. Server flags that this tool does not know are "
        "passed on to both servers.",
        epilog="exit status: 0 all equal, 1 a difference, 2 the comparison could not be made",
    )
    add = parser.add_argument
    add("--model-path", help="checkpoint folder, or demo")
    add(
        "--algorithms",
        help=f"comma-separated speculative algorithms to run (default: {DEFAULT_ALGORITHM})",
    )
    add(
        "--draft-model-path",
        action="append",
        default=[],
        metavar="ALGORITHM=PATH",
        help="draft checkpoint of an algorithm; the bundled ones are used with demo",
    )
    add(
        "--attach",
        nargs=2,
        metavar=("LEFT_URL", "RIGHT_URL"),
        help="compare two servers that run already instead of starting any",
    )
    add(
        "--protocol",
        choices=("native", "openai"),
        help="protocol of attached servers (default: native)",
    )
    add("--api-key", help="bearer key of the servers")
    add(
        "--workloads",
        default=",".join(WORKLOADS),
        help=f"comma-separated, of {', '.join(WORKLOADS)} (default: all)",
    )
    add(
        "--together",
        action="store_true",
        help="run both servers at the same time, where there is room for both (default for demo "
        "on a CPU)",
    )
    add("--short", action="store_true", help="fewer prompts and tokens; for quick tests")
    add("--json", metavar="FILE", help="write the report as JSON")
    add("--html", metavar="FILE", help="write the report as a page")
    return parser


def main(argv: Sequence[str] | None = None, *, launcher: Sequence[str] = LAUNCHER) -> int:
    """Run a comparison; return the verdict as an exit status.

    launcher  module that starts a server, with what comes before the server's flags
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    args, server_flags = build_parser().parse_known_args(argv)
    try:
        job = _job(args, server_flags)
        _check_writable(args)
        with _stop_on_sigterm():
            if args.attach:
                reports = [_run_attached(args, server_flags, job)]
            else:
                reports = _run_started(args, server_flags, job, launcher)
    except (ServerError, ValueError, OSError) as error:
        print(f"sglang parity: {error}", file=sys.stderr)
        return NOT_COMPARED
    except KeyboardInterrupt:
        print("sglang parity: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    print(table(reports))
    command = shlex.join(["sglang", "parity", *argv])
    if args.json:
        Path(args.json).write_text(_record(reports, job, command), encoding="utf-8")
    if args.html:
        Path(args.html).write_text(page(reports, command), encoding="utf-8")
    verdict = overall(reports)
    print(f"verdict: {VERDICTS[verdict]}")
    return verdict


@contextmanager
def _stop_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into an exception, so that no started server is left behind."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _names(text: str, flag: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ValueError(f"{flag} {text!r}: name at least one")
    return names


def _job(args: argparse.Namespace, server_flags: list[str]) -> Job:
    names = _names(args.workloads, "--workloads")
    unknown = [name for name in names if name not in WORKLOADS]
    if unknown:
        raise ValueError(f"--workloads {args.workloads!r}: choose of {', '.join(WORKLOADS)}")
    return Job(
        workloads=names,
        sizes=Sizes.short() if args.short else Sizes(),
        expect_resume=not args.attach and NO_CACHE not in server_flags,
        expect_lossless=not args.attach,
        together=args.together or _is_small(args, server_flags),
    )


def _is_small(args: argparse.Namespace, server_flags: list[str]) -> bool:
    """Whether both servers surely fit this machine at once."""
    on_cpu = "cpu" in server_flags or detect_device() == "cpu"
    return args.model_path == "demo" and on_cpu


def _check_writable(args: argparse.Namespace) -> None:
    """Fail before hours of work, not after. Raises: ValueError for a report that cannot be written."""
    for flag, name in (("--json", args.json), ("--html", args.html)):
        if name:
            try:
                Path(name).open("a", encoding="utf-8").close()
            except OSError as error:
                raise ValueError(
                    f"{flag} {name}: cannot be written ({error.strerror}); name a file in a folder "
                    "that is there"
                ) from error


def _run_attached(args: argparse.Namespace, server_flags: list[str], job: Job) -> AlgorithmReport:
    own = {
        "--model-path": args.model_path,
        "--algorithms": args.algorithms,
        "--draft-model-path": args.draft_model_path,
    }
    extra = " ".join([*(flag for flag, value in own.items() if value), *server_flags])
    if extra:
        raise ValueError(
            f"{extra}: servers that run already take no flags; leave them out, or --attach"
        )
    left, right = args.attach
    if left.rstrip("/") == right.rstrip("/"):
        raise ValueError(f"--attach {left} {right}: both are the same server")
    for url in args.attach:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"--attach {url}: an address begins with http:// or https://")
        check_listening(url)
    make: type[NativeClient] | type[OpenAIClient]
    make = OpenAIClient if args.protocol == "openai" else NativeClient

    def client(url: str) -> Client:
        return make(url, api_key=args.api_key)

    return run_pair("attached", {url: running(partial(client, url)) for url in args.attach}, job)


def _run_started(
    args: argparse.Namespace, server_flags: list[str], job: Job, launcher: Sequence[str]
) -> list[AlgorithmReport]:
    if not args.model_path:
        raise ValueError("--model-path is needed (a checkpoint folder, or demo), or --attach")
    for flag in server_flags:
        name = flag.partition("=")[0]
        if name in CHOSEN_HERE:
            raise ValueError(f"{name}: {CHOSEN_HERE[name]}")
    if args.protocol is not None:
        raise ValueError(
            f"--protocol {args.protocol}: is of --attach; servers started here are asked natively"
        )
    algorithms = _names(
        DEFAULT_ALGORITHM if args.algorithms is None else args.algorithms, "--algorithms"
    )
    for algorithm in algorithms:
        if algorithm not in ALGORITHMS:
            raise ValueError(f"--algorithms {algorithm}: choose of {', '.join(ALGORITHMS)}")
    drafts = _drafts(args, algorithms)
    common = ["--model-path", args.model_path, *server_flags]
    if args.api_key:
        common += ["--api-key", args.api_key]
    reports = []
    for algorithm in algorithms:
        flags = [*common, "--speculative-algorithm", algorithm]
        if algorithm in drafts:
            flags += ["--speculative-draft-model-path", drafts[algorithm]]
        sides = {
            "default": started(flags, api_key=args.api_key, launcher=launcher),
            "lossless": started([*flags, LOSSLESS], api_key=args.api_key, launcher=launcher),
        }
        reports.append(run_pair(algorithm, sides, job))
    return reports


def _drafts(args: argparse.Namespace, algorithms: Sequence[str]) -> dict[str, str]:
    """Draft checkpoint of each algorithm that has one."""
    drafts = dict(BUNDLED_DRAFTS if args.model_path == "demo" else {})
    for item in args.draft_model_path:
        algorithm, _, path = item.partition("=")
        if not path:
            raise ValueError(f"--draft-model-path {item!r}: write ALGORITHM=PATH")
        if algorithm not in algorithms:
            raise ValueError(
                f"--draft-model-path {item}: {algorithm} is not among --algorithms "
                f"{','.join(algorithms)}; add it there"
            )
        drafts[algorithm] = path
    return drafts


def _record(reports: Sequence[AlgorithmReport], job: Job, command: str) -> str:
    record = {
        "command": command,
        "version": __version__,
        "machine": {"platform": platform.platform(), "python": platform.python_version()},
        "sizes": vars(job.sizes),
        "workloads": list(job.workloads),
        "verdict": VERDICTS[overall(reports)],
        "algorithms": [report.to_dict() for report in reports],
    }
    return json.dumps(record, indent=1) + "\n"
