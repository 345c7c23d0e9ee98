"""What a speculative step spends outside the model forwards, and how much it accepts.

    python -m benchmark.speculative.draft_overhead --algorithm DSPARK --requests 8

Runs the engine in this process on the bundled model. Times are means per verify step of wall-clock
around each part, with the device synchronised on a GPU, which makes them upper bounds there.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Callable

import torch

from sglang.test.engine_harness import InProcessEngine

OPTIONS: dict[str, dict] = {
    "NEXTN": {"speculative_num_steps": 3},
    "TREE": {
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 2,
        "speculative_num_draft_tokens": 8,
    },
    "NGRAM": {"speculative_num_draft_tokens": 8},
    "DFLASH": {"speculative_draft_model_path": "demo-dflash"},
    "DSPARK": {"speculative_draft_model_path": "demo-dspark"},
}


class Stopwatch:
    """Seconds spent in wrapped methods, by name."""

    def __init__(self, device: str) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else _nothing

    def wrap(self, owner: object, method: str, name: str) -> None:
        inner = owner.__getattribute__(method)

        def timed(*args, **kwargs):
            self._wait()
            started = time.perf_counter()
            result = inner(*args, **kwargs)
            self._wait()
            self.seconds[name] += time.perf_counter() - started
            return result

        object.__setattr__(owner, method, timed)


def _nothing() -> None:
    """The CPU has nothing to wait for."""


def run(algorithm: str, *, requests: int, tokens: int, temperature: float, device: str) -> None:
    own = OPTIONS[algorithm]
    engine = InProcessEngine(
        "demo",
        device=device,
        speculative_algorithm="NEXTN" if algorithm == "TREE" else algorithm,
        max_running_requests=requests,
        max_total_tokens=requests * (tokens + 512),
        **own,
    )
    rng = random.Random(0)
    prompts = [[rng.randrange(256, 4000) for _ in range(32)] for _ in range(requests)]
    engine.generate(prompts, max_new_tokens=16, ignore_eos=True, temperature=temperature)
    worker = engine.built.worker
    watch = Stopwatch(device)
    watch.wrap(worker, "decode", "step")
    watch.wrap(engine.built.runner, "forward", "target")
    watch.wrap(worker._drafter, "propose", "propose")
    watch.wrap(worker._drafter, "after_verify", "after_verify")
    watch.wrap(worker._accept_rule, "accept", "accept")
    watch.wrap(worker, "_commit_verify", "commit")
    prompts = [[*prompt, 300 + i] for i, prompt in enumerate(prompts)]
    rids = [
        engine.submit(p, max_new_tokens=tokens, ignore_eos=True, temperature=temperature)
        for p in prompts
    ]
    engine.run()
    last = [engine.last(rid) for rid in rids]
    steps = sum(item.spec_verify_ct for item in last)
    accepted = sum(item.spec_accepted_tokens for item in last)
    calls = max(item.spec_verify_ct for item in last)
    total = watch.seconds["step"]
    shares = "  ".join(
        f"{name} {seconds / calls * 1e3:.2f} ms ({seconds / total:.0%})"
        for name, seconds in watch.seconds.items()
    )
    print(f"{algorithm:<7} accept length {accepted / steps:.2f}  {shares}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--algorithm", choices=sorted(OPTIONS), nargs="+", default=sorted(OPTIONS))
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    for algorithm in options.algorithm:
        run(
            algorithm,
            requests=options.requests,
            tokens=options.tokens,
            temperature=options.temperature,
            device=options.device,
        )


if __name__ == "__main__":
    main()
