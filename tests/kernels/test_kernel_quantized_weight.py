"""Quantized weights: the numbers that codes stand for, and what may be done with them."""

from __future__ import annotations

import pytest
import torch
from support.kernels.quantized_weights import KINDS, quantized_weights

from penstock.kernels.packed_codes import along_columns, along_rows, interleaved_columns, order_of
from penstock.kernels.quantized_linear import pack_quantized, quantized_product
from penstock.kernels.quantized_weight import (
    FP4,
    QuantizedWeight,
    in_half_bytes,
    joined,
    quantized,
)

WEIGHTS = quantized_weights(48, 192)


def by_hand(weight: QuantizedWeight, row: int, column: int) -> float:
    """One number by the formula; column: of the codes."""
    half = weight.shape[1] // 2
    match weight.kind:
        case "int4" | "fp4":
            byte = int(weight.codes[row, column % half])
            code = byte >> 4 if column >= half else byte & 15
            value = float(code)
            if weight.kind == "fp4":
                value = FP4[code & 7] * (-1 if code & 8 else 1)
            elif weight.zeros is None:
                value -= 8
        case _:
            value = float(weight.codes[row, column].float())
    group = column // weight.group
    if weight.zeros is not None:
        value -= int(weight.zeros[group, row])
    if weight.scales is not None:
        value *= float(weight.scales.float()[group, row // weight.rows])
    if weight.offsets is not None:
        value += float(weight.offsets[group, row])
    return value if weight.factor is None else value * float(weight.factor[row])


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_is_that_of_the_formula(kind: str) -> None:
    weight = WEIGHTS[kind]
    whole = weight.dequantized()
    for row, column in ((0, 0), (47, 191), (13, 95), (31, 96), (32, 130), (5, 77)):
        source = column if weight.order is None else int(weight.order[column])
        assert float(whole[row, source]) == pytest.approx(by_hand(weight, row, column), rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_may_be_taken_reordered_and_multiplied(kind: str) -> None:
    weight = WEIGHTS[kind]
    rows = torch.tensor([40, 3, 3, 17])
    whole = weight.dequantized()
    assert torch.equal(weight.reordered(rows).dequantized(), whole[rows])
    doubled = weight.multiplied(-2.0).dequantized()
    assert torch.allclose(doubled, -2.0 * whole)
    part = weight.columns(torch.float32, 5, 9)
    order = slice(None) if weight.order is None else weight.order
    assert torch.equal(part, whole[5:9][:, order])


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_has_the_numbers_of_the_whole(kind: str) -> None:
    weight = WEIGHTS[kind]
    whole = weight.dequantized()
    assert torch.equal(weight.part(range(5, 40), range(192)).dequantized(), whole[5:40])
    if weight.order is not None or 96 < weight.group < 192:
        with pytest.raises(ValueError, match="inputs 96 to 192 of 192 are no whole groups"):
            weight.part(range(48), range(96, 192))
        return
    size = 64 if weight.group == 64 else 96
    for first in range(0, 192, size):
        part = weight.part(range(16, 48), range(first, first + size))
        assert part.shape == (32, size)
        assert torch.equal(part.dequantized(), whole[16:48, first : first + size])


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_alike_are_one_below_the_other(kind: str) -> None:
    """Blocks of rows that do not end with a part are spread over its rows."""
    first, second = WEIGHTS[kind], WEIGHTS[kind].multiplied(3.0)
    third = WEIGHTS[kind].reordered(torch.arange(7))
    whole = joined((first, second, third))
    assert whole is not None and whole.shape == (48 + 48 + 7, 192)
    parts = [each.dequantized() for each in (first, second, third)]
    assert torch.allclose(whole.dequantized(), torch.cat(parts), rtol=1e-6)


def test_what_differs_is_not_joined() -> None:
    int8, int4 = WEIGHTS["int8, a scale a row"], WEIGHTS["int4 in groups of 32"]
    ordered = WEIGHTS["int4 with zeros, its inputs in an order"]
    other = ordered._replace(order=torch.arange(192))
    assert joined((int8, int4)) is None
    assert joined((int4, WEIGHTS["int4 in groups of 96"])) is None
    assert joined((ordered, other)) is None and joined((ordered, ordered)) is not None
    assert joined((int8, WEIGHTS["int8 in groups with zeros"]._replace(group=192))) is None
    wide = int4._replace(scales=None if int4.scales is None else int4.scales.float())
    assert joined((int4, wide)) is None


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.008), ("fp8", 0.03), ("int4", 0.085)])
def test_a_weight_is_rounded_by_no_more_than_its_codes_allow(kind: str, most: float) -> None:
    """int4: with the best range of a group; 0.097 with the whole one to either side."""
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    made = quantized(weight, kind, 32 if kind == "int4" else 0)  # type: ignore[arg-type]
    assert float((made.dequantized() - weight).norm() / weight.norm()) < most


def test_a_row_of_zeros_stays_one() -> None:
    for kind in ("int8", "fp8", "int4"):
        made = quantized(torch.zeros(16, 64), kind, 32 if kind == "int4" else 0)  # type: ignore[arg-type]
        assert not made.dequantized().any()


def test_int4_asks_for_whole_groups() -> None:
    with pytest.raises(ValueError, match="int4 in groups of 32 for 48 inputs"):
        quantized(torch.ones(4, 48), "int4", 32)


def test_words_are_unpacked_in_their_formats_order() -> None:
    word = torch.tensor([[0x76543210, -0x10000000]], dtype=torch.int32)  # the second: 0xF0000000
    assert along_columns(word, 4).tolist() == [[*range(8), *[0] * 7, 15]]
    assert along_columns(word, 8).tolist() == [[0x10, 0x32, 0x54, 0x76, 0, 0, 0, 0xF0]]
    assert along_rows(word, 4)[:, 0].tolist() == list(range(8))
    assert along_rows(word, 8)[:, 1].tolist() == [0, 0, 0, 0xF0]
    # Column i of AWQ's word lies where its order 0 2 4 6 1 3 5 7 has i.
    assert interleaved_columns(word)[0, :8].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    halves = torch.arange(16, dtype=torch.uint8)[None]
    assert in_half_bytes(halves).tolist() == [[low | (low + 8) << 4 for low in range(8)]]


def test_an_order_brings_the_inputs_of_groups_together() -> None:
    order = order_of(torch.tensor([1, 0, 1, 0], dtype=torch.int32))
    assert order is not None and order.tolist() == [1, 3, 0, 2]
    assert order_of(torch.tensor([0, 0, 1, 1], dtype=torch.int32)) is None
    assert order_of(None) is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_cpu_multiplies_what_its_kernels_take(kind: str, dtype: torch.dtype) -> None:
    weight = WEIGHTS[kind]
    packed = pack_quantized(weight)
    groups = weight.group in (32, 64) and weight.kind == "int4"
    plain = weight.kind == "int8" and weight.scales is None
    assert (packed is not None) == (groups or plain)
    if packed is None:
        return
    for rows in (1, 5, 33):
        x = torch.randn(rows, 192, generator=torch.Generator().manual_seed(rows)).to(dtype)
        wanted = x.double() @ weight.dequantized(torch.float64).t()
        found = quantized_product(x, packed)
        assert found.dtype == dtype
        assert float((found - wanted).norm() / wanted.norm()) < 1e-2
