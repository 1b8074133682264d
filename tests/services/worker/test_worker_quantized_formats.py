"""Quantized checkpoints: whatever the format, the model computes with the numbers it stands for."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.worker.quantized_folders import (
    WRITERS,
    Stored,
    Twins,
    Writer,
    compressed,
    fp8,
    gptq,
    packed,
    write_twins,
)
from support.worker.whole_logits import CPU, our_logits

from penstock.kernels.quantized_linear import PackedWeight
from penstock.kernels.quantized_weight import QuantizedWeight
from penstock.kernels.two_level_linear import TwoLevelWeight
from penstock.protocol.model_info import read_model_info
from penstock.services.worker.model_weights import load_model
from penstock.services.worker.models.decoder import Decoder
from penstock.services.worker.models.linear import Linear
from penstock.services.worker.models.quantized_linear import QuantizedLinear
from penstock.services.worker.quantization.fp8 import Fp8Format

Folder = Callable[[str], Path]
WIDE = "llama3-wide"
OTHERS = (
    "gptq-4", "gptq-4-whole-rows", "gptq-8", "gptq-8-ordered", "fp8-tensor", "packed-4", "packed-8",
)  # fmt: skip
"""Whose layout, order, groups and bits other formats have as well."""


def assert_alike(ours: torch.Tensor, theirs: torch.Tensor, *, whole_numbers: bool) -> None:
    """whole_numbers: whether products are of these, with activations of 14 bits."""
    if whole_numbers:
        assert float((ours - theirs).norm() / theirs.norm()) < 2e-3
    else:
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)


def twins(tiny_folder: Folder, folder: Path, writer: Writer, variant: str = WIDE) -> Twins:
    return write_twins(tiny_folder(variant), folder, writer)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in OTHERS else ()) for name in WRITERS],
)
def test_logits_are_those_of_the_dequantized_weights(
    name: str, tiny_folder: Folder, tmp_path: Path
) -> None:
    quantized, plain = twins(tiny_folder, tmp_path, WRITERS[name])
    assert_alike(our_logits(quantized), our_logits(plain), whole_numbers=name == "packed-8-rows")


def test_parts_that_are_stored_otherwise_are_computed_beside_the_others(
    tiny_folder: Folder, tmp_path: Path
) -> None:
    """Of queries, keys and values the keys are plain, of gate and up the gate."""
    plain_names = ("k_proj", "gate_proj")
    writer = compressed(4, 32)
    writer.config["ignore"] = ["lm_head", "re:.*k_proj$", "model.layers.0.mlp.gate_proj"]
    writer.config["ignore"].append("model.layers.1.mlp.gate_proj")
    quantized, plain = write_twins(
        tiny_folder(WIDE), tmp_path, writer, lambda name: name.endswith(plain_names)
    )
    torch.testing.assert_close(our_logits(quantized), our_logits(plain), rtol=2e-4, atol=2e-4)
    linears = load(quantized).weights.layers[0].linears
    assert isinstance(linears.qkv, QuantizedLinear) and isinstance(linears.up, QuantizedLinear)
    assert [type(piece) for piece in linears.qkv.pieces] == [
        QuantizedWeight, Linear, QuantizedWeight,
    ]  # fmt: skip
    assert len(linears.up.pieces) == 2


def test_parts_with_orders_of_their_own_are_computed_beside_each_other(
    tiny_folder: Folder, tmp_path: Path
) -> None:
    """``desc_act`` orders the inputs of each weight; those of fused parts need not agree."""
    seeds = itertools.count()

    def store(weight: torch.Tensor) -> Stored:
        order = torch.randperm(weight.shape[1], generator=seeded(next(seeds)))
        made = gptq(4, 32, ordered=True).store(weight[:, order])
        groups, back = made.tensors[".g_idx"], order.argsort()
        codes = packed_codes(made.tensors[".qweight"])[back]
        changed = {".qweight": packed(codes.t(), 4).t().contiguous(), ".g_idx": groups[back]}
        return Stored(made.tensors | changed, made.weight[:, back])

    writer = Writer(gptq(4, 32, ordered=True).config, store)
    quantized, plain = twins(tiny_folder, tmp_path, writer)
    torch.testing.assert_close(our_logits(quantized), our_logits(plain), rtol=2e-4, atol=2e-4)
    qkv = load(quantized).weights.layers[0].linears.qkv
    assert isinstance(qkv, QuantizedLinear) and len(qkv.pieces) == 3


@pytest.mark.parametrize(
    ("variant", "writer"),
    [("phi3", fp8()), ("glm4", fp8(16)), ("cohere", compressed(8, 16))],
    ids=["one tensor for queries, keys and values", "half of a head in pairs", "heads in pairs"],
)
def test_weights_whose_rows_are_reordered_or_stored_in_one_piece(
    variant: str, writer: Writer, tiny_folder: Folder, tmp_path: Path
) -> None:
    quantized, plain = twins(tiny_folder, tmp_path, writer, variant)
    torch.testing.assert_close(our_logits(quantized), our_logits(plain), rtol=2e-4, atol=2e-4)


def test_gptqmodels_rules_for_some_modules_are_followed(
    tiny_folder: Folder, tmp_path: Path
) -> None:
    rules = {"-:.*o_proj": {}, "+:.*down_proj": {"bits": 8, "group_size": 64}}
    default, other = gptq(4, 32), gptq(8, 64)

    def store(weight: torch.Tensor) -> Stored:
        return (other if weight.shape == (128, 256) else default).store(weight)

    writer = Writer(default.config | {"dynamic": rules}, store)
    source = tiny_folder(WIDE)
    quantized, plain = write_twins(source, tmp_path, writer, lambda name: "o_proj" in name)
    torch.testing.assert_close(our_logits(quantized), our_logits(plain), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", ["packed-4", "packed-4-asymmetric", "awq", "packed-8-rows"])
def test_a_few_rows_are_multiplied_by_the_processors_kernels(
    name: str, tiny_folder: Folder, tmp_path: Path
) -> None:
    """But for the rounding of rows to bf16, or where weights are int8 to 14 bits."""
    model = load(twins(tiny_folder, tmp_path, WRITERS[name]).quantized)
    for linear in model.weights.layers[0].linears:
        assert isinstance(linear, QuantizedLinear)
        (piece,) = linear.pieces
        assert isinstance(piece, QuantizedWeight)
        exact, columns = piece.dequantized(torch.float64), linear.specification.inputs
        linear.pack()
        assert linear.packed and isinstance(linear.pieces[0], PackedWeight | TwoLevelWeight)
        exactly = 1e-5 if piece.kind == "int4" else 6e-3
        for rows, most in ((1, 6e-3), (32, 6e-3), (33, exactly)):
            x = torch.randn(rows, columns, generator=seeded(rows))
            wanted = x.double() @ exact.t()
            assert float((linear(x) - wanted).norm() / wanted.norm()) < most


def test_what_the_processor_has_no_kernels_for_becomes_plain(
    tiny_folder: Folder, tmp_path: Path
) -> None:
    model = load(twins(tiny_folder, tmp_path, WRITERS["fp8-block"]).quantized)
    linear = model.weights.layers[0].linears.down
    assert isinstance(linear, QuantizedLinear)
    exact = linear.pieces[0]
    assert isinstance(exact, QuantizedWeight)
    linear.pack()
    (piece,) = linear.pieces
    x = torch.randn(3, linear.specification.inputs)
    assert isinstance(piece, Linear)
    torch.testing.assert_close(linear(x), x @ exact.dequantized().t(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in OTHERS else ()) for name in WRITERS],
)
def test_bytes_are_told_by_the_declaration(name: str, tiny_folder: Folder, tmp_path: Path) -> None:
    """Before and after the weights are packed for a CPU."""
    model = load(twins(tiny_folder, tmp_path, WRITERS[name]).quantized)
    for linear in model.weights.layers[0].linears:
        told = linear.specification.num_bytes(4, on_cpu=False)
        assert linear.num_bytes - spread_scales(linear) == told
        linear.pack()
        assert linear.num_bytes == linear.specification.num_bytes(4, on_cpu=True)


def pieces(linear: Linear) -> list[QuantizedWeight]:
    assert isinstance(linear, QuantizedLinear)
    return [piece for piece in linear.pieces if isinstance(piece, QuantizedWeight)]


def spread_scales(linear: Linear) -> int:
    """Bytes of block scales that are spread over rows, where parts are no whole blocks."""
    found = 0
    for piece in pieces(linear):
        blocks = [each for each in linear.specification.formats if isinstance(each, Fp8Format)]
        if blocks and blocks[0].block and piece.scales is not None and piece.rows == 1:
            told = -(-linear.specification.outputs // blocks[0].block[0])
            found += (piece.scales.shape[1] - told) * 4 * piece.scales.shape[0]
    return found


def load(folder: Path) -> Decoder:
    return load_model(read_model_info(folder), torch.float32, CPU, lambda note: None)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def packed_codes(words: torch.Tensor) -> torch.Tensor:
    """[K / 8, N] int32 → [K, N]."""
    shifts = torch.arange(0, 32, 4)
    return ((words[:, None, :] >> shifts[:, None]) & 15).reshape(-1, words.shape[1])
