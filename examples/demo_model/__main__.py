"""Command line of the training program.

python -m examples.demo_model corpus --data data/demo
python -m examples.demo_model train --data data/demo --out build/demo_model
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import sys
from pathlib import Path

import torch

from examples.demo_model import corpus as corpus_module
from examples.demo_model.batches import TextWindows
from examples.demo_model.card import write_cards
from examples.demo_model.config import FULL_PLAN, SMOKE_PLAN, Phase, Plan
from examples.demo_model.corpus import Corpus
from examples.demo_model.errors import DemoModelError
from examples.demo_model.evaluate import Report, evaluate
from examples.demo_model.export import (
    DRAFT_NAMES,
    export_drafter,
    export_target,
    load_drafter,
    load_target,
)
from examples.demo_model.optimise import Device
from examples.demo_model.progress import Progress
from examples.demo_model.stages import (
    DistillationText,
    train_drafter,
    train_mtp,
    train_target,
    write_own_text,
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo_model", description="Train the bundled demo models."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("corpus", help="fetch, clean and tokenise the text")
    build.add_argument("--data", type=Path, required=True, help="directory for text and tokens")
    for name, text in (
        ("train", "train what is missing, export and evaluate"),
        ("evaluate", "evaluate exported checkpoints again"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("--data", type=Path, required=True)
        command.add_argument("--out", type=Path, required=True, help="directory of the checkpoints")
        command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        command.add_argument("--seed", type=_seed, default=0)
        command.add_argument("--smoke", action="store_true", help="a tiny model, a few steps")
        command.add_argument(
            "--scale", type=_scale, default=1.0, help="multiply the length of every stage"
        )
        if name == "train":
            command.add_argument(
                "--no-graphs", action="store_true", help="do not record steps as CUDA graphs"
            )
            command.add_argument(
                "--keep-target",
                action="store_true",
                help="train only drafters, for the target that --out already holds",
            )
            command.add_argument(
                "--drafters",
                nargs="+",
                choices=tuple(DRAFT_NAMES),
                default=list(DRAFT_NAMES),
                help="drafters to train; --out must already hold the others",
            )
    return parser


def _seed(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative; give 0 or more")
    return value


def _scale(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise DemoModelError(
            f"--device {name} cannot be used here ({reason}); give cpu or cuda"
        ) from error
    return device


def _scaled(plan: Plan, scale: float) -> Plan:
    if scale == 1.0:
        return plan

    def scaled(phase: Phase) -> Phase:
        return dataclasses.replace(phase, steps=max(1, round(phase.steps * scale)))

    return dataclasses.replace(
        plan,
        pretrain=scaled(plan.pretrain),
        long_pretrain=scaled(plan.long_pretrain),
        chat=scaled(plan.chat),
        mtp=scaled(plan.mtp),
        drafter=scaled(plan.drafter),
        own_text_batches=max(1, round(plan.own_text_batches * scale)),
    )


def _train(options: argparse.Namespace, plan: Plan, corpus: Corpus, device: Device) -> None:
    seed, out = options.seed, options.out
    progress = Progress(out, plan, seed, corpus.directory / "tokenizer.json")
    if options.keep_target:
        model = load_target(plan.target, out, device.torch_device)
    else:
        model = train_target(corpus, plan, seed, progress, device)
        export_target(model, corpus, out)
    own = write_own_text(model, corpus, plan, seed, device)
    text = DistillationText(own, TextWindows(corpus, seed + 1), seed)
    if not options.keep_target:
        train_mtp(model, text, plan, progress, device)
        print(f"wrote {export_target(model, corpus, out)}", flush=True)
    for kind in options.drafters:
        drafter = train_drafter(kind, model, text, plan, seed, progress, device)
        print(f"wrote {export_drafter(drafter, out)}", flush=True)


def _evaluate(options: argparse.Namespace, plan: Plan, corpus: Corpus, device: Device) -> Report:
    model = load_target(plan.target, options.out, device.torch_device)
    drafters = {
        kind: load_drafter(plan.drafter_geometry(kind), options.out, device.torch_device)
        for kind in DRAFT_NAMES
    }
    report = evaluate(model, drafters, corpus, plan, options.seed, device)
    (options.out / "report.json").write_text(json.dumps(report.to_json(), indent=2) + "\n")
    return report


def _command_line(options: argparse.Namespace) -> str:
    parts = ["python -m examples.demo_model train --data DATA --out OUT", f"--seed {options.seed}"]
    if options.smoke:
        parts.append("--smoke")
    if options.scale != 1.0:
        parts.append(f"--scale {options.scale}")
    if options.keep_target:
        parts.append("--keep-target")
    if len(options.drafters) < len(DRAFT_NAMES):
        parts.append(f"--drafters {' '.join(options.drafters)}")
    return " ".join(parts)


def _run(options: argparse.Namespace) -> None:
    if options.command == "corpus":
        corpus_module.build(options.data)
        return
    corpus = corpus_module.load(options.data)
    plan = _scaled(SMOKE_PLAN if options.smoke else FULL_PLAN, options.scale)
    graphs = options.command == "train" and not options.no_graphs
    device = Device(_device(options.device), graphs)
    if options.out.exists() and not options.out.is_dir():
        raise DemoModelError(f"--out {options.out} is a file; give a directory")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.command == "train":
        _train(options, plan, corpus, device)
    report = _evaluate(options, plan, corpus, device)
    is_gpu = device.torch_device.type == "cuda"
    device_name = f"one {torch.cuda.get_device_name()}" if is_gpu else "a CPU"
    if options.command == "train":
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        write_cards(options.out, report, _command_line(options), date, device_name)
    print(json.dumps({**report.to_json(), "samples": None}, indent=1))
    for sample in report.samples:
        print("-", sample.replace("\n", "\\n"))


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    options = _parser().parse_args(argv)
    threads = torch.get_num_threads()
    try:
        # With several threads the CPU's matrix library may cut sums differently from run to run, and
        # then the same seed would not give the same weights.
        torch.set_num_threads(1)
        _run(options)
    except DemoModelError as error:
        print(f"demo_model: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("demo_model: interrupted; the same command continues from here", file=sys.stderr)
        return 130
    finally:
        torch.set_num_threads(threads)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
