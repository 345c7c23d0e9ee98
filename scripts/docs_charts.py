"""Pictures and tables of figures: from the planner, and from files that benchmarks wrote."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

from docs_svg import Drawing
from sglang.srt.mem_cache import plan_cli

ROOT = Path(__file__).resolve().parent.parent
GDN_RESULTS = ROOT / "benchmark" / "gdn_verify" / "results"
CACHE_RESULTS = ROOT / "benchmark" / "prefix_cache" / "results.json"
GIB = 1 << 30

PLAN = (
    *("--model-path", "test/registered/unit/model_configs/Qwen3.6-35B-A3B-FP8.json"),
    *("--device-memory-gb", "80", "--mem-fraction-static", "0.8", "--kv-cache-dtype", "bf16"),
    *("--page-size", "64", "--max-running-requests", "25", "--max-mamba-cache-size", "150"),
    *("--speculative-algorithm", "NEXTN", "--json"),
)
"""The configuration of docs/capacity_planning.md."""


def planned() -> dict[str, dict]:
    """The planner's figures of both plans."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.chdir(ROOT):
        status = plan_cli.main(list(PLAN))
    if status:
        raise RuntimeError(f"the planner refused the configuration of the picture ({status})")
    plans: dict[str, dict] = json.loads(out.getvalue())["plans"]
    return plans


def memory() -> Drawing:
    """What becomes of 64 GiB with and without the flag."""
    d = Drawing(760, 196, "Memory of Qwen3.6-35B-A3B-FP8 in 64 GiB, default and lossless verify")
    d.text(
        10, 22, "Qwen3.6-35B-A3B-FP8, 25 requests, MTP drafts, 64 GiB for weights and pools", "bold"
    )
    for y, (name, plan) in zip((44, 128), planned().items(), strict=True):
        scratch = plan["verify_scratch_bytes"] / GIB
        states = plan["state_slot_bytes"] * (plan["max_mamba_cache_size"] + 1) / GIB
        price = plan["kv_bytes_per_token"] + plan["draft_kv_bytes_per_token"]
        kv = plan["max_total_num_tokens"] * price / GIB
        weights = (plan["weight_bytes"] + plan["draft_weight_bytes"]) / GIB
        scale = 640 / (plan["static_bytes"] / GIB)
        d.text(100, y + 24, name, "end")
        x = 110.0
        for words, size, kind in (
            ("weights", weights, "box"),
            ("states", states, "state"),
            ("scratch", scratch, "scratch"),
            ("KV", kv, "new"),
        ):
            d.box(x, y, size * scale, 38, kind)
            if size * scale > 70:
                d.text(x + size * scale / 2, y + 24, f"{words} {size:.1f}", "mid small")
            x += size * scale
        tokens = f"{plan['max_total_num_tokens']:,} tokens of context"
        d.text(750, y + 58, f"verify scratch {scratch:.2f} GiB; {tokens}", "end")
    return d


GDN_VARIANTS = (
    "triton snapshots",
    "triton tuples",
    "cuda snapshots",
    "cuda tuples",
    "cuda deferred",
)


def gdn_records() -> tuple[str, list[dict[str, Any]]]:
    """Machine and records of the latest run of benchmark/gdn_verify."""
    latest = sorted(GDN_RESULTS.glob("*.json"))[-1]
    found = json.loads(latest.read_text(encoding="utf-8"))
    where = f"{found['gpu']}, torch {found['torch']}, {found['date']}, {latest.name}"
    return where, [r for r in found["records"] if r["variant"] in GDN_VARIANTS]


def verify_time() -> Drawing:
    """Verify and commit of 30 layers, by what is kept."""
    where, records = gdn_records()
    cases = list(dict.fromkeys((r["n"], r["d"]) for r in records))
    d = Drawing(760, 40 + 120 * len(cases) + 24, "Time of verify and commit over 30 layers")
    d.text(10, 22, "verify and commit, 30 layers, microseconds (less is better)", "bold")
    scale = 480 / max(r["total"] for r in records)
    for row, (n, width) in enumerate(cases):
        y = 46 + 120 * row
        d.text(10, y + 14, f"{n} requests x {width} rows")
        mine = [r for r in records if (r["n"], r["d"]) == (n, width)]
        for i, record in enumerate(mine):
            kind = "scratch" if "snapshots" in record["variant"] else "new"
            d.text(262, y + 13 + 21 * i, record["variant"], "end small")
            d.box(270, y + 21 * i, record["total"] * scale, 17, kind)
            d.text(274, y + 13 + 21 * i, f"{record['total']:,.0f}", "small")
    d.text(750, 40 + 120 * len(cases) + 14, where, "end small")
    return d


def gdn_table() -> str:
    """The same figures, with their spread and against snapshots of the same kernel family."""
    _, records = gdn_records()
    by_key = {(r["n"], r["d"], r["variant"]): r for r in records}
    lines = [
        "| requests × rows | kernel | keeps | verify, µs | commit, µs | both, µs | spread | both, against Triton snapshots |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in records:
        family, kept = r["variant"].split()
        base = by_key[r["n"], r["d"], "triton snapshots"]["total"]
        parts = [f"{r[name]:,.0f}" if name in r else "" for name in ("verify", "commit")]
        lines.append(
            f"| {r['n']} × {r['d']} | {family} | {kept} | {parts[0]} | {parts[1]} | "
            f"{r['total']:,.0f} | {r['spread']:.0f} | {r['total'] / base:.2f} |"
        )
    return "\n".join(lines)


def cache_table() -> str:
    """Times of the prefix tree."""
    found = json.loads(CACHE_RESULTS.read_text(encoding="utf-8"))
    lines = [
        "| operation | page | tokens in the tree | prompt, tokens | median, ms | p90, ms | bound, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in found["rows"]:
        if r.get("case") != "match":
            continue
        form = f"{r['case']}, prompt as {r['prompt_form']}"
        lines.append(
            f"| {form} | {r['page_size']} | {r['tree_tokens']:,} | {r['prompt_tokens']:,} | "
            f"{r['median_ms']:.3f} | {r['p90_ms']:.3f} | {r['bound_ms']:g} |"
        )
    return "\n".join(lines)


TABLES = {"gdn_verify": gdn_table, "prefix_cache": cache_table}


def with_tables(text: str) -> str:
    """A page with each table between its two marks written again."""
    for name, make in TABLES.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, found, rest = text.partition(begin)
        if found:
            text = f"{before}{begin}\n{make()}\n{end}{rest.partition(end)[2]}"
    return text
