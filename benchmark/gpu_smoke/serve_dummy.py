"""Start a real geometry with random weights on a memory plan of a given size and serve long requests.

    PYTHONPATH=python python benchmark/gpu_smoke/serve_dummy.py --model 35B --requests 25 --input-len 26000 \\
        --output-len 32 --device-memory-gb 80 --out serve-35B.json

The engine runs in this process, speculation and lossless verify on. Checked: every request gets all its
tokens, all of them in the vocabulary, without an abort; states hold no NaN; torch's counter of requested
bytes equals what was planned for weights and pools within 1 %; the peak stays within the planned device.
Exit status 1 if one of these fails, with its reason under "errors".
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from sglang.test.engine_harness import InProcessEngine
from sglang.test.repo import ROOT

CONFIGS = ROOT / "test" / "registered" / "unit" / "model_configs"
MODELS = {"35B": "Qwen3.6-35B-A3B-FP8.json", "27B": "Qwen3.8-27B-FP8.json"}
TOLERANCE = 0.01
REPORT_EVERY_S = 5.0
GIB = 1 << 30


@dataclass
class Report:
    """What the JSON file holds."""

    options: dict[str, object]
    environment: dict[str, str] = field(default_factory=dict)
    plan: dict[str, object] = field(default_factory=dict)
    memory: dict[str, object] = field(default_factory=dict)
    start_seconds: float = 0.0
    serving: dict[str, object] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


def counters() -> dict[str, int]:
    """torch's counters in bytes; zeros without a GPU."""
    gc.collect()
    if not torch.cuda.is_available():
        return {"requested": 0, "allocated": 0, "reserved": 0}
    torch.cuda.synchronize()
    return {
        "requested": torch.cuda.memory_stats().get("requested_bytes.all.current", 0),
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
    }


def start(options: argparse.Namespace) -> InProcessEngine:
    speculation: dict[str, object] = {}
    if options.algorithm != "none":
        speculation = {
            "speculative_algorithm": options.algorithm,
            "speculative_num_steps": 3,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": 4,
            "enable_linear_lossless_verify": not options.no_lossless,
        }
    config = MODELS.get(options.model)
    return InProcessEngine(
        str(CONFIGS / config) if config else options.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        device=options.device,
        device_memory_gb=options.device_memory_gb,
        max_total_tokens=options.max_total_tokens,
        max_running_requests=options.requests,
        chunked_prefill_size=options.chunk,
        page_size=64,
        disable_cuda_graph=options.disable_cuda_graph,
        disable_overlap_schedule=options.disable_overlap_schedule,
        **speculation,
    )


def compare_memory(engine: InProcessEngine, before: dict[str, int], report: Report) -> None:
    """Planned bytes of weights and pools against what torch was asked for since ``before``."""
    plan = engine.built.plan
    planned = {
        "weights": plan.weight_bytes,
        "draft_weights": plan.draft_weight_bytes,
        "pools": plan.pool_bytes,
    }
    total = sum(planned.values())
    used = {name: value - before[name] for name, value in counters().items()}
    report.plan = {
        "device_memory_bytes": plan.device_memory_bytes,
        "static_bytes": plan.static_bytes,
        "max_running_requests": plan.max_running_requests,
        "max_total_num_tokens": plan.max_total_num_tokens,
        "state_slots": plan.max_mamba_cache_size,
        "reserves": {line.name: line.nbytes for line in plan.reserves},
    }
    report.memory = {"planned": planned, "planned_total": total, "used_after_start": used}
    if not torch.cuda.is_available():
        return
    off = used["requested"] / total - 1
    report.memory["requested_over_planned"] = off
    print(f"planned {total / GIB:.3f} GiB, requested {used['requested'] / GIB:.3f} ({off:+.3%})")
    if abs(off) > TOLERANCE:
        report.errors.append(f"requested bytes differ from the plan by {off:+.2%}")


def serve(engine: InProcessEngine, options: argparse.Namespace, report: Report) -> None:
    """Submit everything at once and step until all have ended or the budget is over."""
    vocab = engine.built.runner.model_config.vocab_size
    draw = random.Random(options.seed)
    rids = [
        engine.submit(
            [draw.randrange(vocab) for _ in range(options.input_len)],
            max_new_tokens=options.output_len,
            ignore_eos=True,
        )
        for _ in range(options.requests)
    ]
    scheduler, started = engine.scheduler, time.monotonic()
    steps, reported, prefilled = 0, started, 0.0
    while not scheduler.is_idle:
        scheduler.step()
        steps += 1
        now = time.monotonic()
        if not (scheduler.waiting or scheduler.prefilling) and not prefilled:
            prefilled = now - started
        if now - reported > REPORT_EVERY_S:
            reported = now
            print(
                f"{now - started:6.1f} s, step {steps}: waiting {len(scheduler.waiting)}, "
                f"prefilling {len(scheduler.prefilling)}, running {len(scheduler.running)}, "
                f"ended {scheduler.metrics.num_finished}",
                flush=True,
            )
        if now - started > options.budget_s:
            report.errors.append(f"not done after {options.budget_s:.0f} s")
            break
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    took = time.monotonic() - started
    report.serving = {
        "seconds": took,
        "seconds_until_all_prompts_are_in": prefilled,
        "steps": steps,
        "input_tokens": options.requests * options.input_len,
        "output_tokens": sum(len(engine.ids(rid)) for rid in rids),
        "retractions": scheduler.metrics.num_retracted,
        "accept_length": scheduler.metrics.accept_length(),
    }
    print(json.dumps(report.serving))
    check_answers(engine, rids, vocab, options, report)


def check_answers(
    engine: InProcessEngine,
    rids: list[str],
    vocab: int,
    options: argparse.Namespace,
    report: Report,
) -> None:
    for rid in rids:
        ids = engine.ids(rid)
        reason = engine.last(rid).finish_reason if rid in engine.outputs else None
        if reason is None or reason.type != "length":
            report.errors.append(f"request {rid} ended with {reason}")
        elif len(ids) != options.output_len:
            report.errors.append(f"request {rid} got {len(ids)} of {options.output_len} tokens")
        elif not all(0 <= token < vocab for token in ids):
            report.errors.append(f"request {rid} has tokens outside the vocabulary")
    for name, tensor in engine.state_tensors().items():
        if not all(layer.isfinite().all() for layer in tensor):
            report.errors.append(f"NaN or infinity in {name}")
    if engine.scheduler.is_idle:
        engine.scheduler.check_integrity()


def check_peak(options: argparse.Namespace, before: dict[str, int], report: Report) -> None:
    """Reserved memory at its highest must fit the device that was planned for."""
    if not torch.cuda.is_available():
        return
    peak = torch.cuda.max_memory_reserved() - before["reserved"]
    report.memory["peak_reserved"] = peak
    report.memory["peak_allocated"] = torch.cuda.max_memory_allocated() - before["allocated"]
    print(f"peak: {peak / GIB:.2f} GiB reserved of {options.device_memory_gb:g} GiB planned")
    if peak > options.device_memory_gb * GIB:
        report.errors.append(
            f"{peak / GIB:.2f} GiB reserved on a plan of {options.device_memory_gb:g}"
        )


def environment() -> dict[str, str]:
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    return {"gpu": gpu, "torch": torch.__version__, "python": sys.version.split()[0]}


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="35B, 27B, or the path of a config.json")
    parser.add_argument("--requests", type=int, default=25)
    parser.add_argument("--input-len", type=int, default=26_000)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--device-memory-gb", type=float, default=80.0)
    parser.add_argument("--algorithm", choices=("NEXTN", "none"), default="NEXTN")
    parser.add_argument("--no-lossless", action="store_true")
    parser.add_argument("--disable-cuda-graph", action="store_true")
    parser.add_argument("--disable-overlap-schedule", action="store_true")
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of a prefill chunk")
    parser.add_argument("--max-total-tokens", type=int, default=None)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget-s", type=float, default=170.0, help="of serving")
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse_options(argv)
    shown = {key: str(v) if isinstance(v, Path) else v for key, v in vars(options).items()}
    report = Report(options=shown, environment=environment())
    before, started = counters(), time.monotonic()
    try:
        engine = start(options)
        report.start_seconds = time.monotonic() - started
        print(f"started in {report.start_seconds:.1f} s", flush=True)
        compare_memory(engine, before, report)
        serve(engine, options, report)
        check_peak(options, before, report)
    except Exception as error:
        report.errors.append(f"{type(error).__name__}: {error}")
        raise
    finally:
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(vars(report), indent=1) + "\n"
            options.out.write_text(text, encoding="utf-8")
    for line in report.errors:
        print(f"ERROR: {line}")
    print("errors" if report.errors else "no errors")
    return 1 if report.errors else 0


if __name__ == "__main__":
    raise SystemExit(main())
