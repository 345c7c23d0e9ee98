"""Packed linear maps: values, and independence of a row from its neighbours."""

from __future__ import annotations

import pytest
import torch

from sglang.kernels.ops.cpu import gemm, library
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=15, suite="kernels")


@pytest.fixture(autouse=True)
def native():
    library.select("native")
    yield
    library.select("auto")


def packed(rows: int, cols: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, cols, generator=generator).to(dtype)
    storage = torch.zeros((-(-rows // gemm.PANEL_ROWS) * gemm.PANEL_ROWS, cols), dtype=dtype)
    storage[:rows] = weight
    gemm.pack_inplace(storage)
    return weight, storage


@pytest.mark.parametrize("dtype", gemm.WEIGHT_DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize(("rows", "cols"), [(64, 48), (776, 256), (1, 64), (100, 33)])
@pytest.mark.parametrize("num_rows", [1, 5, 6, 7, 13, 200])
def test_values(dtype, rows, cols, num_rows):
    """A wrong panel stride, tail width or row block shows here; fp64 is the reference."""
    weight, storage = packed(rows, cols, dtype)
    x = torch.randn(num_rows, cols)
    want = x.double() @ weight.double().t()
    got = gemm.packed_linear(x, storage, rows)
    assert got.shape == want.shape
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", gemm.WEIGHT_DTYPES, ids=["fp32", "bf16"])
def test_rows_do_not_depend_on_neighbours(dtype):
    """Tiles of another height must not change a row's summation order."""
    _, storage = packed(200, 96, dtype)
    x = torch.randn(400, 96)
    alone = torch.cat([gemm.packed_linear(x[i : i + 1], storage, 200) for i in range(400)])
    for size in (2, 3, 4, 5, 6, 7, 11, 12, 32, 400):
        together = gemm.packed_linear(x[:size], storage, 200)
        assert torch.equal(together, alone[:size]), size


def test_control_torch_rows_do_depend_on_neighbours_or_order():
    """Control: the sum in another order has other bits, so the equality above is no accident."""
    weight, storage = packed(200, 96, torch.float32)
    x = torch.randn(64, 96)
    reversed_order = x.flip(-1) @ weight.flip(-1).t()
    assert not torch.equal(gemm.packed_linear(x, storage, 200), reversed_order)


def test_more_threads_give_the_same_bits():
    """Panels that two threads split must still be computed whole and once."""
    _, storage = packed(4096, 512, torch.float32)
    x = torch.randn(48, 512)
    one = gemm.packed_linear(x, storage, 4096)
    gemm.set_threads(3)
    try:
        for _ in range(20):
            assert torch.equal(gemm.packed_linear(x, storage, 4096), one)
    finally:
        gemm.set_threads(1)


@pytest.mark.parametrize("dtype", gemm.WEIGHT_DTYPES, ids=["fp32", "bf16"])
def test_packed_rows_are_the_weight_rows(dtype):
    weight, storage = packed(130, 40, dtype)
    ids = torch.tensor([0, 129, 64, 63, 7])
    assert torch.equal(gemm.packed_rows(storage, ids), weight[ids].float())


def test_pack_refuses_partial_panels():
    with pytest.raises(ValueError, match="multiple of 64"):
        gemm.pack_inplace(torch.zeros(65, 8))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
