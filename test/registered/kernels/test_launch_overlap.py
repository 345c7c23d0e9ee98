"""Kernels that may be launched before the one in front has ended.

Catches: a kernel that reads or writes before it has waited (results of half a kernel), launch options that
a compiler does not know, overlap where nothing can wait, and kernels that compute otherwise in a profile.
"""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=12, suite="kernels")

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

import sglang.kernels.ops as ops  # noqa: E402
from sglang.kernels import launch_overlap, triton_support  # noqa: E402
from sglang.kernels.launch_overlap_kernels import after_previous  # noqa: E402
from sglang.kernels.ops.attention.paged import store  # noqa: E402
from sglang.kernels.ops.fused import rows  # noqa: E402
from sglang.kernels.ops.gdn_cuda.module import SOURCE  # noqa: E402
from sglang.test.compile_kernels import AMD, HOPPER, compile_kernel  # noqa: E402


@triton.jit
def waiting_kernel(p_x, p_out, OVERLAP: tl.constexpr):
    """Waits, as all do."""
    after_previous(OVERLAP)
    tl.store(p_out, tl.load(p_x))


@triton.jit
def hasty_kernel(p_x, p_out, OVERLAP: tl.constexpr):
    """Planted: loads what the kernel in front may still be writing."""
    x = tl.load(p_x)
    after_previous(OVERLAP)
    tl.store(p_out, x)


@triton.jit
def careless_kernel(p_x, p_out, OVERLAP: tl.constexpr):
    """Planted: does not wait at all."""
    tl.store(p_out, tl.load(p_x))


def _compile(kernel, target):
    pointers = {"p_x": "*fp32", "p_out": "*fp32"}
    return compile_kernel(kernel, target=target, pointers=pointers, constants={})


def test_a_waiting_kernel_touches_memory_last():
    assert "griddepcontrol.launch_dependents" in _compile(waiting_kernel, HOPPER)["ptx"]


@pytest.mark.parametrize("kernel", [hasty_kernel, careless_kernel])
def test_a_kernel_that_does_not_wait_is_found(kernel):
    with pytest.raises(AssertionError, match="before griddepcontrol.wait"):
        _compile(kernel, HOPPER)


@pytest.mark.parametrize("target", AMD)
def test_other_targets_compile_without_it(target):
    assert "griddepcontrol" not in _compile(waiting_kernel, target)["amdgcn"]


def _kernels_with_overlap():
    root = Path(next(iter(ops.__path__)))
    for path in sorted(root.rglob("*kernel*.py")):
        if "hopper" in path.name:
            continue
        name = ".".join((ops.__name__, *path.relative_to(root).with_suffix("").parts))
        for value in vars(importlib.import_module(name)).values():
            if isinstance(value, triton.runtime.jit.JITFunction) and value.__module__ == name:
                if "OVERLAP" in value.arg_names:
                    yield value


def _reads_nothing_before_it_waits(source: str) -> bool:
    before, wait, _ = source.partition("after_previous(OVERLAP)")
    return bool(wait) and not any(word in before for word in ("load(", "store(", "tl.atomic"))


def test_every_kernel_with_the_option_waits_before_it_reads():
    kernels = list(_kernels_with_overlap())
    assert len(kernels) >= 22
    for kernel in kernels:
        assert _reads_nothing_before_it_waits(kernel.src), kernel.__name__
    assert not _reads_nothing_before_it_waits(hasty_kernel.src)
    assert not _reads_nothing_before_it_waits(careless_kernel.src)


def test_launches_overlap_only_where_kernels_can_wait(monkeypatch):
    assert launch_overlap.overlapping(torch.zeros(1)) == {"OVERLAP": False}
    capability = {"old": (8, 0), "hopper": (9, 0), "next": (10, 0)}
    for name, found in (("old", False), ("hopper", True), ("next", True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, n=name: capability[n])
        monkeypatch.setattr(triton_support, "INTERPRETING", False)
        assert triton_support.is_hopper_or_later.__wrapped__(torch.device("cuda")) is found
    monkeypatch.setattr(triton_support, "is_hopper_or_later", lambda device: True)
    assert launch_overlap.overlapping(torch.zeros(1)) == {"OVERLAP": True, "launch_pdl": True}
    monkeypatch.setattr(launch_overlap, "_is_wanted", True)  # so that undo puts it back
    launch_overlap.use_ordinary_launches()
    assert launch_overlap.overlapping(torch.zeros(1)) == {"OVERLAP": False}
    monkeypatch.undo()
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not triton_support.is_hopper_or_later.__wrapped__(torch.device("cuda"))


def _early_accesses(source: Path) -> list[str]:
    """Accesses to device memory that the CUDA C++ verify makes before it waits."""
    command = ["nvcc", "-arch=sm_90", "-std=c++17", "-ptx", "-o", "-", str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    body = done.stdout[done.stdout.index(".entry gdn_verify") :]
    before, wait, _ = body.partition("griddepcontrol.wait")
    assert wait
    return re.findall(r"\b(?:ld|st|atom|red)\.(?:\w+\.)*?global|cp\.async\.bulk\.\w+", before)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_cuda_verify_keeps_nothing_that_it_reads_early(tmp_path):
    """Catches a slot that stays in the L1 cache from before the kernel in front wrote it, and early writes."""
    harmless = {"ld.relaxed.gpu.global", "cp.async.bulk.prefetch"}
    assert set(_early_accesses(SOURCE)) == harmless
    planted = tmp_path / SOURCE.name
    planted.write_text(
        SOURCE.read_text().replace("early_slot(p, first.req)", "load_unit(p, blockIdx.x).slot")
    )
    assert not set(_early_accesses(planted)) <= harmless


class _Recorded:
    """Stands for a kernel and keeps the options of its launches."""

    def __init__(self):
        self.options = []

    def __getitem__(self, grid):
        return lambda *args, **options: self.options.append(options)


@pytest.mark.parametrize("is_profile", [False, True])
def test_ordinary_launches_run_the_same_code(monkeypatch, is_profile):
    """Catches a profile of other kernels than those in service: the short forms went with the overlap."""
    norms, norm_gates, gates, stores = (_Recorded() for _ in range(4))
    for module, name, kernel in (
        (rows, "rms_norm_kernel", norms),
        (rows, "gated_norm_kernel", norm_gates),
        (rows, "gate_mul_kernel", gates),
        (store, "norm_rope_store_heads_kernel", stores),
    ):
        monkeypatch.setattr(module, name, kernel)
    monkeypatch.setattr(triton_support, "is_hopper_or_later", lambda device: True)
    monkeypatch.setattr(launch_overlap, "_is_wanted", not is_profile)
    for dtype in (torch.bfloat16, torch.float16):
        x, weight = torch.zeros(3, 2, 256, dtype=dtype), torch.zeros(256)
        rows.rms_norm(x, weight, 1e-6, unit_offset=True)
        rows.gated_rms_norm(x, x, weight, 1e-6, activation="silu")
        rows.sigmoid_mul(x, x)
        angles = torch.zeros(4, 32)
        norm = store.NormRope(weight, weight, angles, angles, 1e-6, True)
        where, pool = torch.zeros(3, dtype=torch.int64), torch.zeros(8, 2, 256, dtype=dtype)
        store.norm_rope_store(
            x, x, x, norm, positions=where, slots=where, k_buffer=pool, v_buffer=pool
        )
    for kernel in (norms, norm_gates, gates, stores):
        assert [o["PAIRED"] for o in kernel.options] == [True, False]
        assert [o["OVERLAP"] for o in kernel.options] == [not is_profile] * 2


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
