"""Layers with quantized weights in bfloat16 on a GPU, beside plain ones of the same numbers."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import msgspec
from support.worker.coded_twins import CONFIG, EPS, a_space, agree, step, twins

from penstock.services.worker.gpu.coded_products import CodedProducts, Fp8Products, choose_coded
from penstock.services.worker.gpu.layer_products import LibraryProducts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
WIDE = msgspec.structs.replace(
    CONFIG, hidden_size=1024, num_heads=16, num_kv_heads=4, intermediate_size=3072
)
ROWS = 600


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_products_are_near_those_with_plain_weights_for_all_numbers_of_rows(kind: str) -> None:
    """Those with something inside for the numbers that they are for, the others for the rest."""
    coded, plain = twins(kind, torch.bfloat16, config=WIDE)
    space, other = (a_space(WIDE, torch.bfloat16, ROWS) for _ in range(2))
    choice = choose_coded(coded, space, EPS)
    hopper = torch.cuda.get_device_capability() == (9, 0)
    assert isinstance(choice.kernels, Fp8Products if kind == "fp8" and hopper else CodedProducts)
    alone, reference = LibraryProducts(coded, space, EPS), LibraryProducts(plain, other, EPS)
    most = 0.06 if kind == "fp8" else 0.02
    for rows in (1, 8, 11, 16, 17, 33, 64, 65, 72, 128, 200, 256, 257, 520, ROWS):
        wanted = step(reference, other, rows)
        agree(step(alone, space, rows), wanted, most)
        if choice.kernels.bounds[1] >= rows:
            agree(step(choice.kernels, space, rows), wanted, most)


@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_a_graph_holds_the_products_of_its_number_of_rows(kind: str) -> None:
    coded, _ = twins(kind, torch.bfloat16, config=WIDE)
    space = a_space(WIDE, torch.bfloat16, ROWS)
    choice = choose_coded(coded, space, EPS)
    assert choice.kernels is not None
    for rows in (1, 64, 300):
        products = (
            choice.kernels
            if rows <= choice.kernels.bounds[1]
            else LibraryProducts(coded, space, EPS)
        )
        wanted = step(products, space, rows)
        start = torch.randn(rows, WIDE.hidden_size, generator=torch.Generator().manual_seed(rows))
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            products.begin(rows)
            products.qkv(0, rows)
        space.qkv.zero_()
        space.residual[:rows] = start.to(space.residual)
        graph.replay()
        agree([space.qkv[:rows]], wanted[:1], 1e-6)
