"""Which kernel a weight in words has for a number of rows, and that all give its product."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from support.kernels.quantized_weights import in_words
from support.kernels.triton_device import DEVICE, ON_GPU, error, tolerance

from penstock.kernels.gpu import code_shapes, word_linear
from penstock.kernels.gpu.code_shapes import (
    FEW,
    FEW_ROWS,
    ROW_CLASSES,
    TILED,
    TILED_ROWS,
    product_shape,
)
from penstock.kernels.gpu.few_rows_codes import Shape
from penstock.kernels.gpu.few_rows_codes import takes as few_takes
from penstock.kernels.gpu.fp8_linear import quantize_rows_reference
from penstock.kernels.gpu.int8_linear import (
    int8_linear,
    quantize_rows_int8,
    quantize_rows_int8_reference,
)
from penstock.kernels.gpu.many_rows_codes import TileShape
from penstock.kernels.gpu.many_rows_codes import takes as many_takes
from penstock.kernels.gpu.word_weight import WordWeight, word_weight
from penstock.kernels.quantized_kinds import SPACE_BYTES
from penstock.kernels.quantized_weight import QuantizedWeight, quantized

OUTPUTS, INPUTS = 64, 512
DTYPE = torch.bfloat16 if ON_GPU else torch.float32


def _weights() -> dict[str, QuantizedWeight]:
    generator = torch.Generator().manual_seed(2)
    plain = torch.randn(OUTPUTS, INPUTS, generator=generator)
    scales = torch.rand(INPUTS // 128, OUTPUTS // 32, generator=generator) + 0.5
    fp8 = quantized(plain, "fp8")
    return {
        "int4": quantized(plain, "int4", 128),
        "int8": quantized(plain, "int8"),
        "fp8": fp8,
        "fp8 in blocks": QuantizedWeight("fp8", fp8.codes, 128, scales, 32),
    }


WEIGHTS = _weights()
BIAS = torch.randn(OUTPUTS, generator=torch.Generator().manual_seed(1)).to(DTYPE).to(DEVICE)


def _x(rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, INPUTS, generator=generator).to(DTYPE).to(DEVICE)


def _space() -> Tensor:
    return torch.empty(SPACE_BYTES, dtype=torch.uint8, device=DEVICE)


def _product(kind: str, rows: int, **options: Any) -> tuple[Tensor, Tensor]:
    """What is found, parts summed up, and what is wanted."""
    weight, x = in_words(WEIGHTS[kind], DEVICE), _x(rows)
    out = torch.full((rows, OUTPUTS), 7.0, dtype=DTYPE, device=DEVICE)
    found = word_linear.word_linear(x, weight, BIAS, out, _space(), **options)
    plain = WEIGHTS[kind].dequantized(torch.float64).to(DEVICE)
    return found.sum(0) if found.ndim == 3 else found, x.double() @ plain.t() + BIAS.double()


@pytest.mark.parametrize("kind", WEIGHTS)
def test_every_number_of_rows_has_a_kernel_that_gives_the_product(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows, tiles, and more than have a tile."""
    monkeypatch.setattr(code_shapes, "TILED_ROWS", 24)
    for rows, expected in ((1, Shape), (11, Shape), (20, TileShape), (26, None)):
        for divided in (False, True):
            shape = product_shape(in_words(WEIGHTS[kind], DEVICE), rows, divided=divided)
            assert type(shape) is expected or (shape is None and expected is None)
            found, wanted = _product(kind, rows, divided=divided)
            assert error(found, wanted) < tolerance(DTYPE)
    assert len(_product(kind, 0)[0]) == 0


def test_programs_share_the_width_only_where_somebody_adds_their_parts_up() -> None:
    weight = WordWeight("int4", torch.empty(4096, 1536, dtype=torch.int32, device="meta"),
                        128, None, 1, None, None)  # fmt: skip
    for rows in (1, 64, 200):
        alone, shared = (product_shape(weight, rows, divided=each) for each in (False, True))
        assert alone is not None and shared is not None
        assert alone.splits == 1 < shared.splits
    few = 4096 * 4 * 4 * 64 // 2
    space = torch.empty(few, dtype=torch.uint8)
    assert not word_linear._fit(space, 64, 4096)


@pytest.mark.skipif(ON_GPU, reason="pretends what the library and the device do")
@pytest.mark.parametrize("kind", ["fp8", "fp8 in blocks"])
def test_more_rows_of_fp8_are_quantized_where_the_device_multiplies_it(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many at once as have room."""
    monkeypatch.setattr(word_linear, "takes_coded_rows", lambda weight, dtype: True)
    calls: list[int] = []

    def product(
        codes: Tensor, scales: Tensor, weight: Tensor, factor: Tensor, bias: Tensor, out: Tensor
    ) -> None:
        calls.append(len(codes))
        plain = weight.float() * factor[:, None]
        out.copy_(codes.float() * scales @ plain.t() + bias)

    monkeypatch.setattr(word_linear, "fp8_linear", product)
    rows = 20 if kind == "fp8" else 70
    weight, x = in_words(WEIGHTS[kind], DEVICE), _x(rows)
    parts = 1 if kind == "fp8" else INPUTS // 128
    out = torch.empty(rows, OUTPUTS)
    codes, scales = quantize_rows_reference(x, 0 if kind == "fp8" else 128)
    plain_x = codes.double() * scales.double().repeat_interleave(INPUTS // parts, 1)
    plain = WEIGHTS[kind].dequantized(torch.float64)
    word_linear.word_linear(x, weight, BIAS, out, _space(), quantizes=True)
    # The interpreter rounds some codes wrongly, to half of what they are.
    assert error(out, plain_x @ plain.t() + BIAS.double()) < 0.1
    if kind == "fp8":
        small = torch.empty((INPUTS + 4) * 128, dtype=torch.uint8)
        wide, again = _x(150), torch.empty(150, OUTPUTS)
        word_linear.word_linear(wide, weight, BIAS, again, small, quantizes=True)
        assert calls == [20, 128, 22]
        assert error(again, wide.double() @ plain.t() + BIAS.double()) < 0.1
    calls.clear()
    few, wanted = _product(kind, FEW_ROWS, quantizes=True)
    assert not calls and error(few, wanted) < tolerance(DTYPE)
    unasked, wanted = _product(kind, rows)
    assert not calls and error(unasked, wanted) < tolerance(DTYPE)


@pytest.mark.skipif(ON_GPU, reason="pretends what the device does")
def test_more_rows_of_int8_are_quantized_where_what_made_the_weights_expects_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(word_linear, "takes_coded_rows", lambda weight, dtype: True)
    codes, scales = quantize_rows_int8_reference(_x(70))
    plain = WEIGHTS["int8"].dequantized(torch.float64)
    wanted = (codes.double() * scales.double()) @ plain.t() + BIAS.double()
    found, unrounded = _product("int8", 70, quantizes=True)
    assert error(found, wanted) < 2e-4 < 1e-3 < error(found, unrounded) < 0.02
    fewer, wanted = _product("int8", 64, quantizes=True)
    assert error(fewer, wanted) < tolerance(DTYPE)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fp8", "fp8 in blocks", "int8"])
def test_rows_are_quantized_on_a_gpu(kind: str) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("measured on Hopper alone")
    found, wanted = _product(kind, 72, quantizes=True)
    least = 0.015 if kind != "int8" else 4e-3
    assert least < error(found, wanted) < 0.05


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_stays_so_in_int8_and_spoils_no_other(broken: float) -> None:
    weight, x = WEIGHTS["int8"], _x(3)
    x[1, 7] = broken
    codes = torch.empty(3, INPUTS, dtype=torch.int8, device=DEVICE)
    scales, out = torch.empty(3, 1, device=DEVICE), torch.empty(3, OUTPUTS, dtype=DTYPE).to(DEVICE)
    quantize_rows_int8(x, codes, scales)
    factor = weight.factor
    assert factor is not None
    int8_linear(codes, scales, weight.codes.to(DEVICE), factor.to(DEVICE), BIAS, out)
    assert out.isfinite().all(1).tolist() == [True, False, True]


def test_int8_products_are_exact_but_for_the_last_rounding() -> None:
    """Into a part of wider rows, for numbers of rows and columns that are no whole tiles."""
    weight, x = WEIGHTS["int8"], _x(5)
    codes = torch.empty(5, INPUTS, dtype=torch.int8, device=DEVICE)
    scales = torch.empty(5, 1, device=DEVICE)
    quantize_rows_int8(x, codes, scales)
    wanted, wanted_scales = quantize_rows_int8_reference(x)
    assert error(scales, wanted_scales) < 1e-6
    assert int((codes.int() - wanted.int()).abs().max()) <= 1  # where a quotient is nearly a half
    assert float((codes != wanted).float().mean()) < 0.01
    wide = torch.full((5, OUTPUTS + 3), 7.0, dtype=DTYPE, device=DEVICE)
    factor = weight.factor
    assert factor is not None
    int8_linear(codes, scales, weight.codes.to(DEVICE), factor.to(DEVICE), BIAS, wide[:, :OUTPUTS])
    numbers = codes.double() * scales.double()
    product = numbers @ weight.dequantized(torch.float64).to(DEVICE).t() + BIAS.double()
    assert error(wide[:, :OUTPUTS], product) < tolerance(DTYPE)
    assert bool((wide[:, OUTPUTS:] == 7).all())


def test_all_measured_shapes_can_multiply_their_layers() -> None:
    def weight(layer: code_shapes.Layer) -> WordWeight:
        size = layer.outputs, layer.inputs // (8 if layer.kind == "int4" else 4)
        words = torch.empty(size, dtype=torch.int32, device="meta")
        kind: Any = layer.kind
        return WordWeight(kind, words, 128 if kind == "int4" else layer.inputs, None, 1, None, None)

    for layer, shape in FEW.items():
        assert layer.outputs % (16 * shape.blocks) == 0
        assert few_takes(weight(layer), shape.warps * shape.splits)
    for layer, tile in TILED.items():
        assert many_takes(weight(layer), tile)


def test_one_number_of_rows_stands_for_each_kernel() -> None:
    """What is launched at the start are all that a step may need."""
    for kind, width in (("int4", 512), ("int8", 1024)):
        for outputs in (4096, 12288, 24576):
            words = torch.empty(outputs, width, dtype=torch.int32, device="meta")
            literal: Any = kind
            weight = WordWeight(literal, words, 128, None, 1, None, None)
            for divided in (False, True):
                known = {product_shape(weight, rows, divided=divided) for rows in ROW_CLASSES}
                for rows in range(1, 2 * TILED_ROWS):
                    assert product_shape(weight, rows, divided=divided) in known


@pytest.mark.parametrize(
    ("capability", "dtype", "reason"),
    [
        ((7, 5), torch.bfloat16, "compute capability 8.0, not 7.5"),
        ((9, 0), torch.float16, ""),
        ((9, 0), torch.float32, "--dtype bfloat16"),
        ((8, 6), torch.bfloat16, ""),
        (None, torch.float32, ""),
    ],
)
def test_a_device_or_type_without_these_kernels_is_named(
    capability: tuple[int, int] | None,
    dtype: torch.dtype,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(code_shapes, "device_capability", lambda: capability)
    found = code_shapes.why_not_words(dtype)
    assert reason in found and bool(found) == bool(reason)


def test_fp8_is_multiplied_on_hopper_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = word_weight(WEIGHTS["fp8"])
    for capability, takes in (((9, 0), True), ((8, 0), False), ((10, 0), False)):
        monkeypatch.setattr(code_shapes, "device_capability", lambda: capability)  # noqa: B023
        assert code_shapes.takes_fp8(weight, torch.bfloat16) == takes
        assert not code_shapes.takes_fp8(weight, torch.float16)
        assert not code_shapes.takes_fp8(word_weight(WEIGHTS["int8"]), torch.bfloat16)
