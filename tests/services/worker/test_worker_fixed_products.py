"""Products of ``--deterministic`` by the library: which numbers of rows, and into what memory."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from penstock.services.worker.gpu.fixed_products import (
    agreeing_sizes,
    divide_no_sums,
    fixed_product,
    pieces,
)

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")


def test_rows_are_filled_up_to_sizes_that_agree() -> None:
    sizes = (64, 128, 256, 512)
    assert list(pieces(100, sizes, 4096)) == [(100, 128)]
    assert list(pieces(256, sizes, 4096)) == [(256, 256)]
    assert list(pieces(257, sizes, 4096)) == [(257, 512)]
    assert list(pieces(1300, sizes, 4096)) == [(512, 512), (512, 512), (276, 512)]
    assert list(pieces(1050, sizes, 4096)) == [(512, 512), (512, 512), (26, 0)]


def test_few_rows_and_rows_without_a_size_near_them_have_our_kernel() -> None:
    assert list(pieces(64, (64, 128), 4096)) == [(64, 0)]
    assert list(pieces(100, (), 4096)) == [(100, 0)]
    assert list(pieces(100, (512,), 4096)) == [(100, 0)]
    assert list(pieces(600, (512,), 4096)) == [(512, 512), (88, 0)]


def test_rows_are_filled_up_only_where_there_is_memory() -> None:
    assert list(pieces(100, (64, 128), 110)) == [(64, 64), (36, 0)]
    assert list(pieces(300, (128, 256, 512), 384)) == [(256, 256), (44, 0)]


@pytest.mark.parametrize("rows", [1, 70, 100, 200])
def test_rows_behind_a_step_may_be_overwritten_and_no_others(rows: int) -> None:
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    x = torch.randn(300, 64, device=DEVICE).to(dtype)
    weight = torch.randn(32, 64, device=DEVICE).to(dtype)
    for aligned in (True, False):  # the latter is no memory that the library is tried with
        out = torch.full((340, 32), 7.0, dtype=dtype, device=DEVICE)
        places = [row for row in range(32, 37) if (out[row].data_ptr() % 256 == 0) == aligned]
        start = places[0] if places else 32
        given = out[start : start + rows]
        found = fixed_product(x[20 : 20 + rows], weight, None, given, (64, 128), None)
        assert found is given
        wanted = x[20 : 20 + rows].double() @ weight.double().t()
        assert torch.allclose(given.double(), wanted, rtol=0.02, atol=0.02)
        assert (out[:start] == 7).all()
        if not aligned:
            assert (out[start + rows :] == 7).all()


def test_numbers_of_32_bits_have_our_kernel() -> None:
    x, weight, out = torch.randn(64, 8), torch.randn(8, 8), torch.empty(64, 8)
    assert agreeing_sizes(x, weight, out, None) == ()


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("size", [(1024, 4096), (3072, 1024), (4096, 6144)])
def test_the_librarys_rows_have_the_bits_of_our_kernel_at_sizes_that_agree(
    size: tuple[int, int],
) -> None:
    width, columns = size
    divide_no_sums()
    x = torch.empty(2048, width, dtype=torch.bfloat16, device=DEVICE)
    weight = torch.randn(columns, width, device=DEVICE).to(torch.bfloat16) * width**-0.5
    out = x.new_empty(2048, columns)
    sizes = agreeing_sizes(x, weight, out, None)
    x.normal_()
    alone = fixed_product(x[:1], weight, None, x.new_empty(1, columns), (), None)
    for rows in (1, 65, 130, 500, 1111, 2048):
        fixed_product(x[:rows], weight, None, out[:rows], sizes, None)
        assert torch.equal(out[:1], alone)
