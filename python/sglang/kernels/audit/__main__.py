"""Prints the audit, target by target; exit status 1 if anything is not as it must be."""

from __future__ import annotations

import sys

from sglang.kernels import triton_support


def main() -> int:
    if not triton_support.AVAILABLE:
        print(f"the audit compiles Triton kernels: {triton_support.REASON}")
        return 1
    from sglang.kernels.audit.compile import has_nvcc, run_audit

    print(f"{'variant':34s} {'target':8s} {'expected':>8s}  pairs found          verdict")
    bad = 0
    for finding in run_audit():
        counts = " ".join(f"{dialect} {c.pairs}" for dialect, c in finding.counts.items())
        found = "exact" if finding.exact else "not exact"
        verdict = f"{found}, as it must be" if finding.ok else f"{found}: WRONG"
        bad += not finding.ok
        print(
            f"{finding.variant:34s} {finding.target:8s} {finding.expected:8d}  {counts:20s} {verdict}",
            flush=True,
        )
    if not has_nvcc():
        print("cuda c++ verify: not compiled, there is no nvcc here")
    print("audit passed" if bad == 0 else f"audit FAILED in {bad} places")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
