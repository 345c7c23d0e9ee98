"""Raw speed of one forward call on the CPU, without scheduler and sampling.

Example::

    python benchmark/cpu_decode/bench_forward.py --size demo --threads 1

Prints one line per case: tokens per second of the model call alone, median over rounds with the
spread. Cases: decode of 1 and 8 requests, verify of 1 request with D rows, prefill of 512.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import torch

from sglang.kernels.ops.cpu import gemm, library
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.test.checkpoints import TinyGeometry
from sglang.test.make_checkpoint import make_checkpoint
from sglang.test.model_rig import ModelRig, random_tokens

# Parameters: demo about 8.8M (the bundled model's shape), 117m about 117M.
GEOMETRIES = {
    "demo": TinyGeometry(hidden_size=256, num_hidden_layers=8, intermediate_size=768),
    "117m": TinyGeometry(
        vocab_size=16384,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        linear_num_key_heads=6,
        linear_num_value_heads=12,
        intermediate_size=2304,
    ),
}
WARMUP, ROUNDS = 3, 5


def measure(call: Callable[[], None], *, calls: int) -> tuple[float, float, float]:
    """(median, fastest, slowest) seconds per call over ROUNDS rounds of ``calls`` calls."""
    for _ in range(WARMUP):
        call()
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        seconds.append((time.perf_counter() - start) / calls)
    return statistics.median(seconds), min(seconds), max(seconds)


def report(name: str, tokens: int, timing: tuple[float, float, float]) -> None:
    median, fastest, slowest = timing
    print(
        f"{name:24s} {tokens / median:9.1f} tok/s   {median * 1e3:8.3f} ms"
        f"   [{fastest * 1e3:.3f} .. {slowest * 1e3:.3f}]",
        flush=True,
    )


def run(args: argparse.Namespace, path: str) -> None:
    dtype = getattr(torch, args.weights)
    rig = ModelRig(
        path, kernels=args.kernels, num_requests=8, dtype=dtype, num_draft=args.draft, lossless=True
    )
    if library.library() is not None and args.threads:
        gemm.set_threads(args.threads)
    prompt = random_tokens(rig.config, args.prompt, seed=0)
    calls = args.calls
    rig.run(ForwardMode.EXTEND, [prompt] * 8, [0] * 8)
    for batch in (1, 8):
        fb = rig.batch(ForwardMode.DECODE, [[7]] * batch, [args.prompt] * batch)
        rig.backend.init_forward_metadata(fb)
        report(f"decode x{batch}", batch, measure(lambda fb=fb: rig.model.forward(fb), calls=calls))
    for batch in (1, 8):
        rows = [[7] * args.draft] * batch
        fb = rig.batch(ForwardMode.TARGET_VERIFY, rows, [args.prompt] * batch)
        rig.backend.init_forward_metadata(fb)
        timing = measure(lambda fb=fb: rig.model.forward(fb), calls=calls)
        report(f"verify D={args.draft} x{batch}", batch * args.draft, timing)
    long_prompt = random_tokens(rig.config, 512, seed=1)
    last = torch.tensor([511])
    fb = rig.batch(ForwardMode.EXTEND, [long_prompt], [0], logits_rows=last)
    rig.backend.init_forward_metadata(fb)
    report("prefill 512", 512, measure(lambda: rig.model.forward(fb), calls=max(1, calls // 50)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=sorted(GEOMETRIES), default="demo")
    parser.add_argument("--kernels", choices=library.MODES, default="native")
    parser.add_argument("--weights", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=0, help="0: what the model chose")
    parser.add_argument("--prompt", type=int, default=128, help="context before decode, in tokens")
    parser.add_argument("--draft", type=int, default=4)
    parser.add_argument("--calls", type=int, default=200)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = make_checkpoint(
            f"{directory}/model",
            arch="qwen3_5",
            dtype="fp32" if args.weights == "float32" else "bf16",
            tie=True,
            mtp=False,
            geometry=GEOMETRIES[args.size],
        )
        run(args, str(path))


if __name__ == "__main__":
    main()
