"""Command line of the parity tool; the exit status is the verdict: 0 equal, 1 different, 2 error."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path

from sglang.parity.client import Client, NativeClient, OpenAIClient, ServerError
from sglang.parity.compare import compare
from sglang.parity.report import AlgorithmReport, page, table
from sglang.parity.servers import ServerProcess
from sglang.parity.workloads import WORKLOADS, Outcome, Sizes

LOSSLESS = "--enable-linear-lossless-verify"
BUNDLED_DRAFTS = {"DFLASH": "demo-dflash", "DSPARK": "demo-dspark"}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang parity",
        description="Show that lossless verify gives the outputs of the default verify, bit for "
        "bit; or compare any two running servers. Server flags that this tool does not know are "
        "passed on to both servers.",
        epilog="exit status: 0 all equal, 1 a difference, 2 the comparison could not be made",
    )
    parser.add_argument("--model-path", help="checkpoint folder, or demo")
    parser.add_argument(
        "--algorithms",
        default="NEXTN",
        help="comma-separated speculative algorithms to run (default: NEXTN)",
    )
    parser.add_argument(
        "--draft-model-path",
        action="append",
        default=[],
        metavar="ALGORITHM=PATH",
        help="draft checkpoint of an algorithm; the bundled ones are used with demo",
    )
    parser.add_argument(
        "--attach",
        nargs=2,
        metavar=("LEFT_URL", "RIGHT_URL"),
        help="compare two servers that run already instead of starting any",
    )
    parser.add_argument(
        "--protocol",
        choices=("native", "openai"),
        default="native",
        help="protocol of attached servers (default: native)",
    )
    parser.add_argument("--api-key", help="bearer key of attached servers")
    parser.add_argument(
        "--workloads",
        default=",".join(WORKLOADS),
        help=f"comma-separated, of {', '.join(WORKLOADS)} (default: all)",
    )
    parser.add_argument("--short", action="store_true", help="a few tokens of each; for tests")
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON")
    parser.add_argument("--html", metavar="FILE", help="write the report as a page")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run a comparison; return the verdict as an exit status."""
    argv = sys.argv[1:] if argv is None else argv
    args, server_flags = build_parser().parse_known_args(argv)
    try:
        workloads = _chosen_workloads(args.workloads)
        sizes = Sizes.short() if args.short else Sizes()
        if args.attach:
            left_name, right_name = args.attach
            reports = [_run_attached(args, workloads, sizes)]
        else:
            left_name, right_name = "default", "lossless"
            reports = _run_started(args, server_flags, workloads, sizes)
    except (ServerError, ValueError) as error:
        print(f"sglang parity: {error}", file=sys.stderr)
        return 2
    print(table(reports, left_name, right_name))
    command = shlex.join(["sglang", "parity", *argv])
    equal = all(report.equal for report in reports)
    if args.json:
        record = {
            "command": command,
            "equal": equal,
            "algorithms": [report.to_dict() for report in reports],
        }
        Path(args.json).write_text(json.dumps(record, indent=1))
    if args.html:
        Path(args.html).write_text(page(reports, left_name, right_name, command))
    print("verdict: " + ("equal" if equal else "NOT equal"))
    return 0 if equal else 1


def _chosen_workloads(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    unknown = [name for name in names if name not in WORKLOADS]
    if unknown or not names:
        raise ValueError(f"--workloads {text!r}: choose one or more of {', '.join(WORKLOADS)}")
    return names


def _run_attached(args: argparse.Namespace, workloads: list[str], sizes: Sizes) -> AlgorithmReport:
    if args.protocol == "native":
        clients = [NativeClient(url, api_key=args.api_key, digests=False) for url in args.attach]
    else:
        clients = [OpenAIClient(url, api_key=args.api_key) for url in args.attach]
    sides = {
        url: [_run_all(client, workloads, sizes, url) for _ in range(2)]
        for url, client in zip(args.attach, clients, strict=True)
    }
    return _report("attached", sides, clients[0])


def _run_started(
    args: argparse.Namespace, server_flags: list[str], workloads: list[str], sizes: Sizes
) -> list[AlgorithmReport]:
    if not args.model_path:
        raise ValueError("--model-path is needed (a checkpoint folder, or demo), or --attach")
    drafts = dict(BUNDLED_DRAFTS if args.model_path == "demo" else {})
    for item in args.draft_model_path:
        algorithm, _, path = item.partition("=")
        if not path:
            raise ValueError(f"--draft-model-path {item!r}: write ALGORITHM=PATH")
        drafts[algorithm] = path
    reports = []
    for algorithm in [name for name in args.algorithms.split(",") if name]:
        flags = ["--model-path", args.model_path, "--speculative-algorithm", algorithm]
        if algorithm in drafts:
            flags += ["--speculative-draft-model-path", drafts[algorithm]]
        flags += server_flags
        reports.append(_run_algorithm(algorithm, flags, workloads, sizes))
    return reports


def _run_algorithm(
    algorithm: str, flags: list[str], workloads: list[str], sizes: Sizes
) -> AlgorithmReport:
    with ExitStack() as stack:
        sides: dict[str, list[dict[str, Outcome]]] = {}
        clients: dict[str, NativeClient] = {}
        for side, extra in (("default", []), ("lossless", [LOSSLESS])):
            _say(f"{algorithm}: starting the {side} server")
            server = stack.enter_context(ServerProcess([*flags, *extra]))
            clients[side] = NativeClient(server.url)
            sides[side] = [
                _run_all(clients[side], workloads, sizes, f"{algorithm}, {side}, run {run}")
                for run in (1, 2)
            ]
        return _report(algorithm, sides, clients["default"])


def _run_all(client: Client, workloads: list[str], sizes: Sizes, label: str) -> dict[str, Outcome]:
    """Run the workloads on a flushed server."""
    outcomes = {}
    for name in workloads:
        _say(f"{label}: {name}")
        client.flush()
        outcomes[name] = WORKLOADS[name](client, sizes)
    return outcomes


def _report(
    algorithm: str, sides: dict[str, list[dict[str, Outcome]]], client: Client
) -> AlgorithmReport:
    report = AlgorithmReport(algorithm)
    (_, left_runs), (_, right_runs) = sides.items()
    for name in left_runs[0]:
        for group in compare(left_runs[0][name], right_runs[0][name], client):
            report.across[group.group] = group
        for side, runs in sides.items():
            for group in compare(runs[0][name], runs[1][name], None):
                report.within.setdefault(side, {})[group.group] = group
    lengths = [
        c.accept_length
        for outcome in right_runs[0].values()
        for c in outcome.completions
        if c.accept_length
    ]
    report.accept_length = sum(lengths) / len(lengths) if lengths else None
    return report


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


