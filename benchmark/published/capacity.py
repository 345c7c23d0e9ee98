"""What lossless verify frees in the published set-ups: plans alone, no GPU, no weights.

    PYTHONPATH=python python benchmark/published/capacity.py [--out capacity.json]

The freed bytes depend on geometry, requests and draft width; the tokens that a card holds depend on the
rest, too, which the published figures do not say. So the gain is compared with the published gain, and
beside it stand the plans of a card of --device-memory-gb.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from setups import ROOT, check_output, write_json

from sglang.srt.configs.draft_config import DraftConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.plan_inputs import MemoryPlanError
from sglang.srt.mem_cache.plan_types import MemoryPlan
from sglang.srt.mem_cache.planner import make_plan
from sglang.srt.server_args import ServerArgs

CONFIGS = ROOT / "test" / "registered" / "unit" / "model_configs"
GIB = 1 << 30


@dataclass(frozen=True)
class SetUp:
    """A published set-up: model, drafter, rows of a verify, requests, state slots; and its figures.

    stock_tokens, gained_tokens  published: tokens without the flag, and how many more with it
    scratch_gib                  published: recurrent-state scratch without and with the flag
    """

    name: str
    model: str
    algorithm: str
    draft: str | None
    draft_tokens: int
    requests: int
    state_slots: int
    stock_tokens: int
    gained_tokens: int
    scratch_gib: tuple[float, float]


SETUPS = (
    SetUp(
        *("35B MTP, 25 requests", "Qwen3.6-35B-A3B-FP8", "NEXTN", None, 4, 25, 150),
        *(498_880, 289_344, (6.09, 0.10)),
    ),
    SetUp(
        *("35B MTP", "Qwen3.6-35B-A3B-FP8", "NEXTN", None, 4, 8, 40),
        *(1_007_680, 100_096, (2.11, 0.03)),
    ),
    SetUp(
        *("35B DFlash", "Qwen3.6-35B-A3B-FP8", "DFLASH", "Qwen3.6-35B-A3B-DFlash", 16, 8, 40),
        *(390_208, 200_832, (8.44, 0.13)),
    ),
    SetUp(
        *("27B DFlash 2", "Qwen3.8-27B-FP8", "DFLASH", "Qwen3.8-27B-DFlash2", 8, 8, 40),
        *(176_640, 125_824, (10.12, 0.16)),
    ),
    SetUp(
        *("27B DSpark", "Qwen3.8-27B-FP8", "DSPARK", "Qwen3.8-27B-DSpark", 8, 8, 40),
        *(178_944, 125_888, (10.12, 0.16)),
    ),
)


def planned(setup: SetUp, *, lossless: bool, memory_gib: float, fraction: float) -> MemoryPlan:
    """The plan of one arm. Raises: MemoryPlanError if the card is too small."""
    draft = None
    if setup.draft is not None:
        draft = DraftConfig.from_path(str(CONFIGS / f"{setup.draft}.json"))
    args = ServerArgs(
        model_path="none",
        device="cuda",
        dtype="bfloat16",
        kv_cache_dtype="bfloat16",
        page_size=64,
        context_length=262_144,
        chunked_prefill_size=8192,
        mem_fraction_static=fraction,
        max_running_requests=setup.requests,
        max_mamba_cache_size=setup.state_slots,
        speculative_algorithm=setup.algorithm,
        speculative_num_steps=setup.draft_tokens - 1 if setup.algorithm == "NEXTN" else 1,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=setup.draft_tokens,
        mamba_radix_cache_strategy="extra_buffer",
        mamba_full_memory_ratio=0.9,
        cuda_graph_bs=[1, 2, 4, 8],
        enable_linear_lossless_verify=lossless,
    )
    return make_plan(
        ModelConfig.from_path(str(CONFIGS / f"{setup.model}.json")),
        args,
        device_memory_bytes=int(memory_gib * GIB),
        draft_config=draft,
    )


def record_of(setup: SetUp, memory_gib: float, fraction: float) -> dict[str, Any]:
    """Figures of both arms: gains on a card that is large enough, tokens on the one asked for."""
    large = [planned(setup, lossless=on, memory_gib=640, fraction=0.9) for on in (False, True)]
    own: list[int | None] = []
    for lossless in (False, True):
        try:
            plan = planned(setup, lossless=lossless, memory_gib=memory_gib, fraction=fraction)
            own.append(plan.max_total_num_tokens)
        except MemoryPlanError:
            own.append(None)
    gain = large[1].max_total_num_tokens - large[0].max_total_num_tokens
    return {
        **asdict(setup),
        "planned_scratch_gib": [p.verify_ssm_scratch_bytes / GIB for p in large],
        "planned_gain": gain,
        "planned_gain_of_published_stock": gain / setup.stock_tokens,
        "tokens_on_card": own,
    }


def table(records: Sequence[dict[str, Any]], memory_gib: float, fraction: float) -> str:
    """Markdown."""
    lines = [
        f"| set-up | requests × rows | scratch, GiB (published) | tokens gained (published) | of the "
        f"published stock | tokens in {memory_gib:g} GiB × {fraction:g}, off → on |",
        "|---|---|---|---|---|---|",
    ]
    for r in records:
        scratch = " → ".join(f"{gib:.2f}" for gib in r["planned_scratch_gib"])
        published = " → ".join(f"{gib:.2f}" for gib in r["scratch_gib"])
        card = " → ".join("none" if n is None else f"{n:,}" for n in r["tokens_on_card"])
        lines.append(
            f"| {r['name']} | {r['requests']} × {r['draft_tokens']} | {scratch} ({published}) | "
            f"{r['planned_gain']:,} ({r['gained_tokens']:,}) | "
            f"+{100 * r['planned_gain_of_published_stock']:.0f} % | {card} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device-memory-gb", type=float, default=80.0, help="memory of the card, GiB"
    )
    parser.add_argument("--mem-fraction-static", type=float, default=0.8)
    parser.add_argument("--out", type=Path, help="write JSON, too")
    args = parser.parse_args(argv)
    if not (0 < args.mem_fraction_static < 1 and 0 < args.device_memory_gb < math.inf):
        parser.error("--device-memory-gb must be above 0 and --mem-fraction-static between 0 and 1")
    check_output(parser, "--out", args.out)
    records = [record_of(s, args.device_memory_gb, args.mem_fraction_static) for s in SETUPS]
    print(table(records, args.device_memory_gb, args.mem_fraction_static))
    if args.out is not None:
        write_json(args.out, records)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
