"""Compiles a variant for a target and counts the pairs in each text it yields."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang.kernels.audit.assembly import PairCount, count_pairs
from sglang.kernels.audit.variants import TARGETS, Target, Variant, all_variants
from sglang.kernels.ops.attention.fla.recurrent_launch import NUM_STAGES

CUDA_SOURCE = Path(__file__).parents[1] / "ops" / "gdn_cuda" / "csrc" / "gdn_verify.cu"
CUDA_TARGETS = ("sm_90", "sm_100", "sm_120")
_CUDA_ELEMENTS = 64


@dataclass(frozen=True)
class Finding:
    """One cell of the table. counts: dialect -> pairs; expected pairs a step and thread; ok: audit passed."""

    variant: str
    target: str
    counts: dict[str, PairCount]
    expected: int
    planted: bool

    @property
    def exact(self) -> bool:
        """Every text holds the pairs of one step (or of whole steps) and no other form of it."""
        return all(
            c.pairs >= self.expected
            and c.pairs % self.expected == 0
            and c.contracted == 0
            and c.flushes == 0
            for c in self.counts.values()
        )

    @property
    def ok(self) -> bool:
        return self.exact != self.planted


def nvdisasm_path() -> Path | None:
    """The disassembler that Triton carries, if it does."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    return path if path.exists() else None


def disassemble(cubin: bytes) -> str:
    """SASS text. Raises: RuntimeError if Triton carries no nvdisasm or it fails."""
    tool = nvdisasm_path()
    if tool is None:
        raise RuntimeError("this Triton carries no nvdisasm")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run([str(tool), "-c", str(path)], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"nvdisasm failed: {done.stderr[-500:]}")
    return done.stdout


def audit_variant(variant: Variant, target: Target) -> Finding:
    """Compile one variant for one target and read it."""
    constants = dict(variant.constants) | {"BV": variant.tile[0]}
    names = variant.kernel.arg_names
    if "PTX" in names:
        constants["PTX"] = target.is_nvidia
    if "OVERLAP" in names:
        constants["OVERLAP"] = target.is_nvidia and target.arch >= 90
    signature = {
        name: "constexpr" if name in constants else variant.pointers.get(name, "i32")
        for name in names
    }
    aligned = {n for n, t in variant.pointers.items() if t.startswith("*")} | set(variant.aligned)
    attrs = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in aligned}
    source = ASTSource(variant.kernel, signature, constants, attrs)
    compiled = triton.compile(
        source,
        target=GPUTarget(target.backend, target.arch, target.warp_size),
        options={"num_warps": variant.tile[1], "num_stages": NUM_STAGES},
    )
    if target.is_nvidia:
        texts = {"ptx": compiled.asm["ptx"], "sass": disassemble(compiled.asm["cubin"])}
    else:
        texts = {"amdgcn": compiled.asm["amdgcn"]}
    counts = {dialect: count_pairs(text, dialect) for dialect, text in texts.items()}
    return Finding(
        variant.name,
        target.name,
        counts,
        variant.elements_per_thread(target),
        variant.planted,
    )


def audit_cuda_source(arch: str) -> Finding:
    """The CUDA C++ kernel, if the machine has nvcc; steps and pending replay hold one set of pairs each."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        done = subprocess.run(
            ["nvcc", f"-arch={arch}", "-cubin", "-DMIN_CTAS=3", "-o", str(cubin), str(CUDA_SOURCE)],
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            raise RuntimeError(f"nvcc failed for {arch}: {done.stderr[-2000:]}")
        text = disassemble(cubin.read_bytes())
    return Finding(
        "cuda c++ verify fp32", arch, {"sass": count_pairs(text, "sass")}, _CUDA_ELEMENTS, False
    )


def has_nvcc() -> bool:
    return shutil.which("nvcc") is not None


def run_audit() -> Iterator[Finding]:
    """Every variant on every target it serves, then the CUDA C++ kernel where nvcc is present."""
    for variant in all_variants():
        for target in TARGETS:
            if variant.serves(target):
                yield audit_variant(variant, target)
    if has_nvcc():
        for arch in CUDA_TARGETS:
            yield audit_cuda_source(arch)
