"""Accept length of each drafter on held-out text, in the engine, against the model card.

    python -m examples.demo_model corpus --data .data/demo      # once
    python benchmark/speculative/held_out_acceptance.py --data .data/demo

The prompts are 64-token windows of the corpus that training left out; greedy, 256 tokens each.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from sglang.test.engine_harness import InProcessEngine

PROMPT_TOKENS = 64
DRAFTS = {
    "NEXTN": {},
    "DFLASH": {"speculative_draft_model_path": "demo-dflash"},
    "DSPARK": {"speculative_draft_model_path": "demo-dspark"},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=Path(".data/demo"))
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    file = args.data / "tokens" / "held_out.bin"
    if not file.is_file():
        parser.error(f"--data {args.data}: no {file}; run python -m examples.demo_model corpus")
    tokens = np.fromfile(file, dtype=np.uint16)
    starts = np.random.default_rng(0).integers(0, len(tokens) - PROMPT_TOKENS, args.prompts)
    prompts = [tokens[s : s + PROMPT_TOKENS].astype(int).tolist() for s in starts]
    results = {}
    for algorithm, options in DRAFTS.items():
        engine = InProcessEngine(
            "demo",
            speculative_algorithm=algorithm,
            enable_linear_lossless_verify=True,
            max_total_tokens=32768,
            **options,
        )
        engine.generate(prompts, max_new_tokens=args.new_tokens, ignore_eos=True)
        metrics = engine.scheduler.metrics
        results[algorithm] = {
            "accept_length": round(metrics.accept_length(), 3),
            "verify_steps": metrics.verify_ct,
        }
        print(f"{algorithm:8s} accept length {metrics.accept_length():.3f}", flush=True)
    if args.output:
        record = {"date": time.strftime("%Y-%m-%d"), "prompts": args.prompts, "results": results}
        args.output.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
