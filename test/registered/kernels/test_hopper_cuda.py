"""The CUDA kernel of FP8 products: on a GPU of compute capability 9.0 against fp64 and the Triton tiles; compiled
where NVRTC or nvcc is installed, which needs no GPU; and its choice, which needs neither."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess

import pytest
import torch

from sglang.kernels.ops.quantization import hopper_cuda, launch
from sglang.kernels.ops.quantization.launch import HopperTile
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.kernel_cases import run_cases

register_cpu_ci(est_time=8, suite="kernels")
register_cuda_ci(est_time=90, stage="base-b", runner_config="1-gpu-large")

FORMS = [(grouped, gated) for grouped in (False, True) for gated in (False, True)]
EVERY_FORM = pytest.mark.parametrize(("grouped", "gated"), FORMS)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a GPU of compute capability 9.0",
)
def test_the_cuda_product_agrees_with_the_reference():
    run_cases(__file__, "hopper_cuda_cases.py", TRITON_INTERPRET="0")


@pytest.mark.skipif(not hopper_cuda.HAS_BINDINGS, reason="needs cuda-bindings with NVRTC")
@EVERY_FORM
def test_the_cuda_product_compiles(grouped, gated):
    for tile in (HopperTile(), HopperTile(watch=True)):
        cubin = hopper_cuda.compile_cubin(tile, grouped=grouped, gated=gated)
        assert cubin[:4] == b"\x7fELF"


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@EVERY_FORM
def test_the_cuda_product_has_its_sums_in_registers(grouped, gated, tmp_path):
    """Catches sums that spill: the multiplying groups have 232 registers a thread and the others 40."""
    defines = [f"-DGROUPED={int(grouped)}", f"-DGATED={int(gated)}", "-DWATCH=0"]
    command = ["nvcc", "-arch=sm_90a", "-std=c++17", "-cubin", "-Xptxas", "-v", *defines]
    command += ["-o", str(tmp_path / "kernel.cubin"), str(hopper_cuda.SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    used = re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", done.stderr)
    assert used == ["0", "0", "0"], done.stderr[-1000:]


def test_the_launch_and_the_source_describe_one_kernel():
    """Catches an argument that one of them has and the other not, and shared memory that is too small."""
    text = hopper_cuda.SOURCE.read_text()
    body = re.search(r"struct Params \{(.*?)\};", text, re.DOTALL)
    assert body is not None
    names = re.findall(r"(\w+);", re.sub("//.*", "", body[1]))
    assert names == [name for name, _ in hopper_cuda._Params._fields_]
    pointers = len(re.findall(r"\*\w+;", body[1]))
    kinds = [kind for _, kind in hopper_cuda._Params._fields_]
    assert kinds == [ctypes.c_void_p] * pointers + [ctypes.c_int] * (len(names) - pointers)
    assert (
        f"STAGES = {hopper_cuda._STAGES};" in text and f"THREADS = {hopper_cuda._THREADS};" in text
    )
    assert hopper_cuda.SHARED_BYTES <= 227 * 1024


@pytest.fixture
def pretended(monkeypatch):
    """A GPU of compute capability 9.0, as far as the choice can see."""
    caches = (hopper_cuda._is_ready, hopper_cuda._say_once)
    for each in caches:
        each.cache_clear()
    monkeypatch.setattr(hopper_cuda, "_is_hopper", lambda device: True)
    yield monkeypatch
    for each in caches:
        each.cache_clear()


def choose(rows=4096, *, shape=(512, 256), dtype=torch.bfloat16, gated=False):
    weight = torch.empty(shape, device="meta")
    return hopper_cuda.hopper_tile(rows, weight, dtype, gated=gated)


def test_the_choice_is_of_prompts_whole_tiles_and_bf16(pretended):
    """Catches decode rows on tiles of 128 rows, or a result that the kernel cannot make."""
    loaded = []
    pretended.setattr(hopper_cuda, "HAS_BINDINGS", True)
    pretended.setattr(hopper_cuda, "_index_of", lambda device: 0)
    pretended.setattr(hopper_cuda, "_function", lambda *kind: loaded.append(kind))
    assert choose(launch.SMALL_ROWS) is None and not loaded
    assert choose(launch.SMALL_ROWS + 1) == launch.MANY_ON_HOPPER is not None
    assert choose() == choose(dtype=torch.bfloat16) and loaded == [(HopperTile(0), False, False, 0)]
    assert choose(shape=(256, 128), gated=True) and choose(shape=(3, 256, 128)) and len(loaded) == 3
    assert choose(dtype=torch.float16) is None and choose(dtype=torch.float32) is None
    assert choose(shape=(384, 256)) is None and choose(shape=(512, 64)) is None
    assert choose(shape=(256, 64), gated=True) is None and len(loaded) == 3
    pretended.setattr(launch, "MANY_ON_HOPPER", None)
    assert choose() is None


@pytest.mark.parametrize("has_bindings", [False, True])
def test_without_a_compiler_triton_serves_and_one_line_says_so(pretended, caplog, has_bindings):
    """Catches a server that ends, or that complains with every product."""

    def fails(*kind):
        raise RuntimeError("NVRTC is not there")

    pretended.setattr(hopper_cuda, "HAS_BINDINGS", has_bindings)
    pretended.setattr(hopper_cuda, "_index_of", lambda device: 0)
    pretended.setattr(hopper_cuda, "_function", fails)
    for _ in range(3):
        assert choose() is None and choose(gated=True) is None
    (line,) = caplog.messages
    assert ("NVRTC is not there" if has_bindings else "'cuda-bindings' is not installed") in line


def test_a_device_that_cannot_run_it_is_named():
    assert "compute capability 9.0" in str(hopper_cuda.unavailable_reason(torch.device("cpu")))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
