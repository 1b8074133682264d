"""The GPU's products with weights in words, for few rows and for many, beside their reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from support.kernels.triton_device import DEVICE, ON_GPU, error, tolerance

from penstock.kernels.gpu.few_rows_codes import Shape, few_rows_codes
from penstock.kernels.gpu.few_rows_codes import takes as few_takes
from penstock.kernels.gpu.fp8_linear import (
    CODES,
    fp8_block_linear,
    quantize_rows,
    quantize_rows_reference,
)
from penstock.kernels.gpu.many_rows_codes import (
    TileShape,
    many_rows_codes,
    piece_rows,
    widen,
    widened_linear,
)
from penstock.kernels.gpu.many_rows_codes import takes as many_takes
from penstock.kernels.gpu.word_weight import WordWeight, codes_of, why_not, word_weight
from penstock.kernels.quantized_weight import QuantizedWeight, quantized

OUTPUTS, INPUTS = 64, 512
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
"""The interpreter truncates when it rounds to bf16."""


def _weights() -> dict[str, QuantizedWeight]:
    generator = torch.Generator().manual_seed(3)

    def positive(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator) + 0.5

    weight = torch.randn(OUTPUTS, INPUTS, generator=generator)
    halves = torch.randint(0, 256, (OUTPUTS, INPUTS // 2), generator=generator, dtype=torch.uint8)
    zeros = torch.randint(0, 17, (INPUTS // 64, OUTPUTS), generator=generator).to(torch.int16)
    fp8 = quantized(weight, "fp8").codes
    return {
        "int4 in groups of 32": quantized(weight, "int4", 32),
        "int4 in groups of 64": quantized(weight, "int4", 64),
        "int4 in groups of 128": quantized(weight, "int4", 128),
        "int4 in groups of 256": quantized(weight, "int4", 256),
        "int4 with zeros and a factor": QuantizedWeight(
            "int4", halves, 64, positive(INPUTS // 64, OUTPUTS).half(), 1, zeros, positive(OUTPUTS)
        ),
        "int8": quantized(weight, "int8"),
        "int8, the scale in a group of all": QuantizedWeight(
            "int8", quantized(weight, "int8").codes, INPUTS, positive(1, OUTPUTS)
        ),
        "fp8": quantized(weight, "fp8"),
        "fp8 in blocks": QuantizedWeight(
            "fp8", fp8, 128, positive(INPUTS // 128, OUTPUTS // 32), 32
        ),
    }  # fmt: skip


WEIGHTS = _weights()


def _on_device(weight: WordWeight) -> WordWeight:
    moved = [each.to(DEVICE) if isinstance(each, Tensor) else each for each in weight]
    return WordWeight(*moved)  # type: ignore[arg-type]


def _x(rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, INPUTS, generator=generator).to(DTYPE).to(DEVICE)


@pytest.mark.parametrize("kind", WEIGHTS)
def test_few_rows_are_multiplied_with_the_dequantized_weight(kind: str) -> None:
    """Whatever the shape, into a part of wider rows; in parts, by programs that share the width."""
    weight = WEIGHTS[kind]
    words = _on_device(word_weight(weight))
    plain = weight.dequantized(torch.float64).to(DEVICE)
    for rows, shape in ((1, Shape(1, 4, 9, 2)), (11, Shape(2, 2, 1, 1))):
        assert few_takes(words, shape.warps)
        x, wide = _x(rows), torch.full((rows, OUTPUTS + 5), 7.0, dtype=DTYPE, device=DEVICE)
        few_rows_codes(x, words, None, wide[:, 2 : OUTPUTS + 2], shape)
        assert error(wide[:, 2 : OUTPUTS + 2], x.double() @ plain.t()) < tolerance(DTYPE)
        assert bool((wide[:, :2] == 7).all()) and bool((wide[:, OUTPUTS + 2 :] == 7).all())
    bias = torch.randn(OUTPUTS, generator=torch.Generator().manual_seed(1)).to(DTYPE).to(DEVICE)
    parts = torch.full((2, 9, OUTPUTS), 7.0, device=DEVICE)
    few_rows_codes(_x(9), words, bias, parts, Shape(1, 2, 2, 1, 2))
    assert error(parts.sum(0), _x(9).double() @ plain.t() + bias.double()) < tolerance(DTYPE)


@pytest.mark.parametrize("blocks", [1, 2])
def test_few_rows_are_gated(blocks: int) -> None:
    """One block has gate and up, of two each has one."""
    weight = WEIGHTS["int4 with zeros and a factor"]
    words, x = _on_device(word_weight(weight)), _x(3) * 0.01
    bias = torch.randn(OUTPUTS, generator=torch.Generator().manual_seed(1)).to(DTYPE).to(DEVICE)
    out = torch.empty(3, OUTPUTS // 2, dtype=DTYPE, device=DEVICE)
    few_rows_codes(x, words, bias, out, Shape(blocks, 4, 1, 1), gated=True)
    product = x.double() @ weight.dequantized(torch.float64).to(DEVICE).t() + bias.double()
    gate, up = product.chunk(2, 1)
    assert error(out, torch.nn.functional.silu(gate) * up) < tolerance(DTYPE)


@pytest.mark.parametrize("kind", WEIGHTS)
def test_many_rows_are_multiplied_with_the_dequantized_weight(kind: str) -> None:
    """In one sum, in parts, and by the library."""
    weight, rows = WEIGHTS[kind], 18
    words, x = _on_device(word_weight(weight)), _x(18)
    plain = weight.dequantized(torch.float64).to(DEVICE)
    bias = torch.randn(OUTPUTS, generator=torch.Generator().manual_seed(1)).to(DTYPE).to(DEVICE)
    wanted = x.double() @ plain.t() + bias.double()
    for shape in (
        TileShape(16, 64, 4, 2),
        TileShape(32, 64, 4, 3, 2),
        TileShape(32, 64, 4, 3, 1, True),
    ):
        assert many_takes(words, shape)
        out = torch.empty(rows, OUTPUTS, dtype=DTYPE, device=DEVICE)
        if shape.splits > 1:
            out = torch.empty(shape.splits, rows, OUTPUTS, device=DEVICE)
        many_rows_codes(x, words, bias, out, shape)
        assert error(out.sum(0) if out.ndim == 3 else out, wanted) < tolerance(DTYPE)
    out = torch.empty(rows, OUTPUTS, dtype=DTYPE, device=DEVICE)
    space = torch.empty(piece_rows(words, x.element_size()) * INPUTS, dtype=DTYPE, device=DEVICE)
    widened_linear(x, words, bias, out, space)
    assert error(out, wanted) < tolerance(DTYPE)
    some = torch.empty(32, INPUTS, dtype=DTYPE, device=DEVICE)
    widen(words, 16, some)
    assert error(some, plain[16:48]) < tolerance(DTYPE)


def test_words_hold_the_codes_of_the_weight() -> None:
    weight = WEIGHTS["int4 in groups of 128"]
    both = torch.cat((weight.codes & 15, weight.codes >> 4), 1)
    assert torch.equal(codes_of(word_weight(weight)), both.float())


@pytest.mark.parametrize("dtype", [DTYPE, torch.float16], ids=str)
def test_every_code_of_8_bits_is_read_as_it_is(dtype: torch.dtype) -> None:
    """Subnormal ones too; but NaN of e4m3, which no checkpoint may have."""
    codes = torch.arange(256, dtype=torch.uint8)
    for kind in ("int8", "fp8"):
        own = codes.clone()
        if kind == "fp8":
            own[(own & 0x7F) == 0x7F] = 0
        stored = torch.int8 if kind == "int8" else CODES
        one = QuantizedWeight(kind, own.view(1, 256).repeat(16, 1).view(stored), 256)
        x = torch.eye(16, 256, dtype=dtype, device=DEVICE)
        for first in range(0, 256, 16):
            out = torch.empty(16, 16, dtype=dtype, device=DEVICE)
            few_rows_codes(
                x.roll(first, 1), _on_device(word_weight(one)), None, out, Shape(1, 4, 1, 1)
            )
            assert torch.equal(out[:, 0].float().cpu(), one.codes[0, first : first + 16].float())


@pytest.mark.parametrize("kind", WEIGHTS)
def test_rows_in_fp16_are_multiplied_as_well(kind: str) -> None:
    weight, half = WEIGHTS[kind], torch.float16
    words = _on_device(word_weight(weight))
    plain = weight.dequantized(torch.float64).to(DEVICE)
    x = _x(5).to(half)
    for shape in (Shape(1, 4, 9, 2), TileShape(16, 64, 4, 2)):
        out = torch.empty(5, OUTPUTS, dtype=half, device=DEVICE)
        if isinstance(shape, Shape):
            few_rows_codes(x, words, None, out, shape)
        else:
            many_rows_codes(x, words, None, out, shape)
        assert error(out, x.double() @ plain.t()) < tolerance(half)


def test_weights_that_have_no_words_say_why() -> None:
    weight = WEIGHTS["int4 in groups of 32"]
    order = torch.arange(INPUTS)
    assert "order" in why_not(weight._replace(order=order))
    assert "groups of 96" in why_not(quantized(torch.randn(16, 384), "int4", 96))
    assert "multiples" in why_not(quantized(torch.randn(16, 576), "int4", 64))
    assert not any(why_not(each) for each in WEIGHTS.values())


@pytest.mark.parametrize("columns", [0, 128])
def test_rows_are_quantized_each_by_itself(columns: int) -> None:
    x = _x(5)
    codes = torch.empty(5, INPUTS, dtype=CODES, device=DEVICE)
    scales = torch.empty(5, INPUTS // columns if columns else 1, device=DEVICE)
    quantize_rows(x, codes, scales)
    wanted, wanted_scales = quantize_rows_reference(x, columns)
    assert error(scales, wanted_scales) < 1e-6
    differ = codes.view(torch.uint8) != wanted.view(torch.uint8)
    # The interpreter rounds some numbers wrongly.
    assert float(differ.float().mean()) <= (0 if ON_GPU else 0.04)


def test_fp8_products_have_scales_of_blocks() -> None:
    weight, x = WEIGHTS["fp8 in blocks"], _x(5)
    codes, scales = quantize_rows_reference(x, 128)
    plain_x = codes.double() * scales.double().repeat_interleave(128, 1)
    wanted = plain_x @ weight.dequantized(torch.float64).to(DEVICE).t()
    of_weight = weight.codes.to(DEVICE), weight.scales.to(DEVICE)  # type: ignore[union-attr]
    for splits in (1, 2):
        out = torch.empty(splits, 5, OUTPUTS, device=DEVICE)
        fp8_block_linear(codes, scales, *of_weight, 32, None, out, tile=(16, 64), splits=splits)
        assert error(out.sum(0), wanted) < 1e-5
