"""Speed on the CPU: this engine against transformers (and llama.cpp where installed), alternating.

    python benchmark/cpu_engine/bench.py --model-path demo --rounds 5 --output results.json

Measures one-stream decode, eight-stream decode and prefill of 512 tokens, speculation off, fp32, in
one process each, arms taken in turn so that a slow minute of the machine hits both. Prints medians
with minimum and maximum, and ratios; writes JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import platform
import random
import statistics
import sys
import time
from multiprocessing.connection import Connection

NUM_NEW = 128
PREFILL = 512


def prompts(count: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(16, vocab - 64) for _ in range(length)] for _ in range(count)]


class OursArm:
    """`sglang.Engine`, offline; options are server arguments."""

    def __init__(self, model_path: str, vocab: int, **options) -> None:
        from sglang import Engine

        self.vocab = vocab
        self.engine = Engine(
            model_path=model_path,
            device="cpu",
            disable_radix_cache=True,
            log_level="error",
            **options,
        )

    def run(self, streams: int, prompt_len: int, num_new: int, seed: int) -> float:
        batch = prompts(streams, prompt_len, self.vocab, seed)
        begin = time.perf_counter()
        self.engine.generate(
            input_ids=batch,
            sampling_params={"temperature": 0, "max_new_tokens": num_new, "ignore_eos": True},
        )
        return time.perf_counter() - begin

    def close(self) -> None:
        self.engine.shutdown()


class TransformersArm:
    """The reference implementation's own `generate`, greedy, with its cache."""

    def __init__(self, model_path: str, vocab: int, **options) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(options.get("threads", 2))
        self.vocab = vocab
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()

    def run(self, streams: int, prompt_len: int, num_new: int, seed: int) -> float:
        ids = self.torch.tensor(prompts(streams, prompt_len, self.vocab, seed))
        begin = time.perf_counter()
        with self.torch.inference_mode():
            self.model.generate(
                ids,
                attention_mask=self.torch.ones_like(ids),
                max_new_tokens=num_new,
                min_new_tokens=num_new,
                do_sample=False,
                pad_token_id=0,
            )
        return time.perf_counter() - begin

    def close(self) -> None:
        """Nothing to stop."""


def serve_arm(name: str, model_path: str, vocab: int, pipe: Connection) -> None:
    """Run one arm in its own process; answers (streams, prompt, new, seed) with seconds."""
    if name == "transformers":
        arm = TransformersArm(model_path, vocab)
    else:
        spec = {"speculative_algorithm": "NEXTN", "enable_linear_lossless_verify": True}
        arm = OursArm(model_path, vocab, **(spec if name == "ours-mtp" else {}))
    pipe.send("ready")
    while (job := pipe.recv()) is not None:
        pipe.send(arm.run(*job))
    arm.close()


CASES = {
    "decode, 1 stream": (1, 16, NUM_NEW, lambda t, p: NUM_NEW / (t - p)),
    "decode, 8 streams": (8, 16, NUM_NEW, lambda t, p: 8 * NUM_NEW / (t - p)),
    "prefill of 512": (1, PREFILL, 1, lambda t, p: PREFILL / t),
}


def measure(arms: dict[str, Connection], rounds: int) -> dict:
    """Tokens per second per case and arm; the first round is discarded."""
    seen: dict = {case: {name: [] for name in arms} for case in CASES}
    for round_id in range(rounds + 1):
        for case, (streams, length, num_new, rate) in CASES.items():
            for name, pipe in arms.items():
                seed = 1000 * round_id + length + streams
                prefill_s = 0.0
                if num_new > 1:
                    pipe.send((streams, length, 1, seed))
                    prefill_s = pipe.recv()
                pipe.send((streams, length, num_new, seed))
                total_s = pipe.recv()
                if round_id:
                    seen[case][name].append(rate(total_s, prefill_s))
                print(f"\r{round_id}/{rounds} {case:20s} {name:14s}", end="", file=sys.stderr)
    print(file=sys.stderr)
    return seen


def report(seen: dict, base: str) -> dict:
    table = {}
    print(f"{'tokens per second':20s} {'arm':14s} {'median':>9s} {'min':>9s} {'max':>9s}  ratio")
    for case, by_arm in seen.items():
        base_median = statistics.median(by_arm[base]) if base in by_arm else None
        for name, values in by_arm.items():
            median = statistics.median(values)
            ratio = median / base_median if base_median else None
            table.setdefault(case, {})[name] = {
                "median": median,
                "min": min(values),
                "max": max(values),
                "ratio": ratio,
                "runs": len(values),
            }
            shown = f"{ratio:.2f}x" if ratio else "-"
            print(
                f"{case:20s} {name:14s} {median:9.1f} {min(values):9.1f} {max(values):9.1f}  {shown}"
            )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model-path", default="demo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--arms", default="ours,ours-mtp,transformers")
    parser.add_argument("--output")
    args = parser.parse_args()
    from sglang.bundled import resolve_model_path
    from sglang.srt.configs.model_config import ModelConfig

    path = resolve_model_path(args.model_path)
    vocab = ModelConfig.from_path(path).vocab_size
    names = [n for n in args.arms.split(",") if n]
    if "transformers" in names and importlib.util.find_spec("transformers") is None:
        names.remove("transformers")
        print("transformers is not installed; its arm is left out", file=sys.stderr)
    context = multiprocessing.get_context("spawn")
    arms, processes = {}, []
    for name in names:
        ours, theirs = context.Pipe()
        process = context.Process(target=serve_arm, args=(name, path, vocab, theirs))
        process.start()
        if ours.recv() != "ready":
            raise RuntimeError(f"{name} did not start")
        arms[name] = ours
        processes.append(process)
    try:
        table = report(measure(arms, args.rounds), "transformers")
    finally:
        for pipe in arms.values():
            pipe.send(None)
        for process in processes:
            process.join(30)
    if args.output:
        record = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": f"{platform.machine()}, {multiprocessing.cpu_count()} cores",
            "command": " ".join(sys.argv),
            "model": args.model_path,
            "results": table,
        }
        with open(args.output, "w") as out:
            json.dump(record, out, indent=1)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
