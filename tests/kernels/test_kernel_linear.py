"""Linear layers against plain float64 products, and the identity of their rows."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels import linear as linear_module
from penstock.kernels.linear import (
    PACKED_ROW_MINIMUM,
    add_packed_linear,
    can_pack,
    packed_linear,
    packed_weight,
    padded_rows,
    rows_agree,
)

TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 0.25}
SHAPES = [(96, 48), (300, 64), (97, 33), (512, 256), (256, 688), (2048, 1024)]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_products_equal_the_formula(dtype: torch.dtype, biased: bool) -> None:
    weight, rows, residual = (
        torch.randn(shape).to(dtype) for shape in ((70, 200), (5, 200), (5, 70))
    )
    bias = torch.randn(70).to(dtype) if biased else None
    expected = rows.double() @ weight.double().t() + (bias.double() if bias is not None else 0.0)
    packed = packed_weight(weight)
    if packed is None:
        pytest.skip("this machine's library packs no such weight")
    with torch.inference_mode():
        assert (packed_linear(rows, packed, bias) - expected).abs().max() < TOLERANCE[dtype]
        added = add_packed_linear(residual, rows, packed, bias)
    assert (added - (expected + residual.double())).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("shape", "threads"),
    [
        pytest.param(shape, threads, marks=pytest.mark.slow if (threads == 2) == number % 2 else ())
        for number, shape in enumerate(SHAPES)
        for threads in (1, 2)
    ],
)
def test_a_row_of_a_packed_fp32_product_has_the_same_bits_in_every_batch(
    shape: tuple[int, int], threads: int
) -> None:
    weight, bias = packed_weight(torch.randn(shape)), torch.randn(shape[0])
    if weight is None:
        pytest.skip("this machine's library does not agree: the executor pads rows instead")
    rows, residual = torch.randn(300, shape[1]), torch.randn(300, shape[0])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            whole = packed_linear(rows, weight, bias)
            added = add_packed_linear(residual, rows, weight, bias)
            for count in (*range(PACKED_ROW_MINIMUM, 36), 48, 63, 64, 65, 127, 128, 200, 299):
                part = slice(300 - count, 300)
                alone = packed_linear(rows[part], weight, bias)
                assert torch.equal(alone, whole[part]), count
                alone = add_packed_linear(residual[part], rows[part], weight, bias)
                assert torch.equal(alone, added[part]), count
    finally:
        torch.set_num_threads(before)


def test_products_are_computed_with_few_numbers_of_rows() -> None:
    filled = {rows: padded_rows(rows) for rows in range(1, 2049)}
    assert len(set(filled.values())) <= 40
    assert all(rows <= many <= max(rows + 1, rows * 1.4) for rows, many in filled.items())


def test_rows_that_depend_on_their_number_are_noticed() -> None:
    weight = torch.randn(32, 16)
    assert rows_agree(lambda x: x[:, :1] * weight[0], 16)
    assert not rows_agree(lambda x: x[:, :1] * (1.0 + 1e-6 * (len(x) == 9)), 16)


def test_a_shape_whose_rows_do_not_agree_stays_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "rows_agree", lambda product, width: False)
    assert packed_weight(torch.randn(8, 16)) is None


def test_other_devices_and_types_are_not_packed() -> None:
    assert not can_pack(torch.empty(4, 4, device="meta"))
    assert not can_pack(torch.empty(4, 4, dtype=torch.float16))
