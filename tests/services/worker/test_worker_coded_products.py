"""Layers with quantized weights on a GPU: which products they have, and that all agree.

Without a GPU the kernels are interpreted; what the library and Gluon's kernel multiply in FP8 there
is multiplied by torch.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from support.worker.coded_twins import CONFIG, EPS, a_space, agree, step, twins

from penstock.kernels.gpu import code_shapes
from penstock.services.worker.gpu import coded_products
from penstock.services.worker.gpu.coded_products import CodedProducts, Fp8Products, choose_coded
from penstock.services.worker.gpu.kernel_choice import KernelChoice
from penstock.services.worker.gpu.layer_products import BoundedProducts, LibraryProducts
from penstock.services.worker.gpu.row_linears import RowsLinear
from penstock.services.worker.models.dense import DenseConfig
from penstock.services.worker.models.linear import Linear
from penstock.services.worker.models.linear_specification import KeptPart
from penstock.services.worker.models.quantized_linear import QuantizedLinear
from penstock.services.worker.models.weight_words import (
    give_words,
    with_forms,
    words_of_products,
)
from penstock.services.worker.quantization.format import Form

CPU, ROWS = torch.device("cpu"), 40
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="pretends to have a GPU")


@pytest.mark.parametrize(
    "kind", ["int4", *(pytest.param(each, marks=pytest.mark.slow) for each in ("int8", "fp8"))]
)
def test_products_with_words_are_those_with_plain_weights(kind: str) -> None:
    """Of few rows with the gate inside, of some with tiles in parts, of more than have tiles."""
    coded, plain = twins(kind)
    space, reference = a_space(), LibraryProducts(plain, a_space(), EPS)
    few = CodedProducts(coded, space, EPS)
    assert few.bounds == (1, 16)
    for products, rows in ((few, 3), (few, 16), (LibraryProducts(coded, space, EPS), 20)):
        agree(step(products, space, rows), step(reference, reference._space, rows), 1e-5)


def test_more_rows_than_have_tiles_are_multiplied_with_the_widened_weight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(code_shapes, "TILED_ROWS", 24)
    coded, plain = twins("int4")
    space, reference = a_space(), LibraryProducts(plain, a_space(), EPS)
    found = step(LibraryProducts(coded, space, EPS), space, 30)
    agree(found, step(reference, reference._space, 30), 1e-5)


def product_in_fp8(
    codes: Tensor, scales: Tensor, weight: Tensor, factor: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    out.copy_(codes.float() * scales @ (weight.float() * factor[:, None]).t())


def gluon_by_torch(activation: str, place: Any) -> RowsLinear:
    """In parts where those of the kernel may be."""
    specification = place.specification

    def multiply(layer: int, rows: int, out: Tensor) -> Tensor:
        numbers = torch.empty(rows, specification.outputs)
        scales = place.x_scales[:rows, None]
        product_in_fp8(
            place.x[:rows], scales, place.weights[layer], place.factors[layer], None, numbers
        )  # fmt: skip
        if specification.shard == "inputs":
            return torch.stack((0.25 * numbers, 0.75 * numbers))
        if specification.gated:
            gate, up = numbers.chunk(2, 1)
            numbers = torch.nn.functional.silu(gate) * up
        return out.copy_(numbers)

    return RowsLinear(multiply, gate_inside=specification.gated)


def test_all_products_of_rows_in_fp8_are_near_those_with_plain_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Few rows by Gluon's kernel, more by the library; none is left in memory of another."""
    monkeypatch.setattr(coded_products, "_few", gluon_by_torch)
    monkeypatch.setattr(coded_products, "fp8_linear", product_in_fp8)
    monkeypatch.setattr(coded_products, "GLUON_ROWS", 4)
    coded, plain = twins("fp8")
    space, reference = a_space(), LibraryProducts(plain, a_space(), EPS)
    products = Fp8Products(coded, space, EPS)
    assert products.bounds == (1, ROWS)
    for rows in (1, 4, 9, ROWS):  # the interpreter rounds some codes to half of what they are
        agree(step(products, space, rows), step(reference, reference._space, rows), 0.15)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A Hopper GPU, and the linear layers that are compiled for it; nothing is compiled."""
    module = pytest.importorskip("penstock.kernels.gpu.rows_linear_hopper")
    compiled: list[dict[str, Any]] = []

    class Compiled:
        def __init__(self, *arguments: object, **options: object) -> None:
            compiled.append(options)

    monkeypatch.setattr(module, "HopperLinear", Compiled)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(code_shapes, "multiprocessors", lambda: 132)
    return compiled


def chosen(
    kind: str, config: DenseConfig = CONFIG, ranks: Any = None
) -> KernelChoice[BoundedProducts | None]:
    coded, _ = twins(kind, torch.bfloat16, ranks, config)
    space = a_space(config, torch.bfloat16)
    return choose_coded(coded, space, EPS, config.activation)


def test_on_hopper_fp8_has_products_of_its_own(hopper: list[dict[str, Any]]) -> None:
    choice = chosen("fp8")
    assert isinstance(choice.kernels, Fp8Products)
    assert choice.summary == "kernels for FP8 on Hopper"
    assert [(linear["gated"], linear["divided"]) for linear in hopper] == [
        (False, False), (False, True), (True, False), (False, True),
    ]  # fmt: skip
    assert all(linear["out_dtype"] == torch.bfloat16 for linear in hopper)


@pytest.mark.usefixtures("hopper")
def test_integers_have_kernels_for_words_of_few_rows() -> None:
    choice = chosen("int4")
    assert isinstance(choice.kernels, CodedProducts)
    assert choice.summary == "kernels for words"


def test_where_fp8_has_none_of_its_own_the_log_says_why(
    hopper: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks: Any = "ranks"
    divided = chosen("fp8", ranks=ranks)
    assert isinstance(divided.kernels, CodedProducts) and "ranks sum" in divided.summary
    narrow = msgspec.structs.replace(CONFIG, num_heads=8, num_kv_heads=1, head_dim=16)
    assert "not 160 x 256" in chosen("fp8", narrow).summary

    def fails(*arguments: object, **options: object) -> None:
        raise RuntimeError("no such layout")

    monkeypatch.setattr("penstock.kernels.gpu.rows_linear_hopper.HopperLinear", fails)
    failed = chosen("fp8")
    assert isinstance(failed.kernels, CodedProducts)
    assert "no such layout" in failed.summary
    assert not hopper


@pytest.mark.usefixtures("hopper")
def test_a_gate_that_no_kernel_has_inside_is_computed_behind_the_product() -> None:
    choice = chosen("int8", msgspec.structs.replace(CONFIG, activation="gelu_tanh"))
    assert choice.kernels is None
    assert choice.summary == "products alone: the gate is gelu_tanh"


def test_what_has_no_words_is_counted_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    linears = [linear for layer in twins("int8").coded.layers for linear in layer.linears]
    assert words_of_products(linears) == "; products: 8 by kernels for words"
    assert words_of_products([Linear.allocate(linears[0].specification, torch.float32, CPU)]) == ""
    form = Form("int4", 96, 1, 2)
    specification = msgspec.structs.replace(linears[0].specification, inputs=384)
    other = with_forms(specification, [KeptPart(512, form)], torch.bfloat16, CPU, quantizes=False)
    wide = with_forms(
        specification, [KeptPart(512, Form("int8", 0))], torch.float32, CPU, quantizes=False
    )
    monkeypatch.setattr(code_shapes, "device_capability", lambda: (9, 0))
    give_words([other, wide])
    assert words_of_products([*linears, other, wide]) == (
        "; products: 8 by kernels for words, 1 by the slower one for any form (groups of 96 "
        "columns), 1 by the slower one for any form (activations are float32; --dtype bfloat16 has "
        "faster ones)"
    )
    assert other.words is None and wide.words is None


def test_weights_are_in_words_once_and_take_as_much_memory_as_before() -> None:
    """Codes of eight bits are not copied."""
    for kind in ("int4", "int8"):
        specification = twins(kind).coded.layers[0].linears.up.specification
        linear = QuantizedLinear(specification, torch.float32, CPU)
        linear.draw(0.1, torch.Generator().manual_seed(1))
        before, first = linear.num_bytes, linear.pieces[0]
        address = first.codes.data_ptr()  # type: ignore[union-attr]
        give_words([linear])
        assert linear.words is not None and linear.num_bytes == before
        assert (linear.words.words.data_ptr() == address) == (kind == "int8")
        give_words([linear])
        assert linear.num_bytes == before
