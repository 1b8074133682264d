"""Which part of the tensors of a quantized weight is read for some of its outputs and inputs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.worker.quantized_folders import WRITERS

from penstock.kernels.quantized_weight import QuantizedWeight
from penstock.services.worker.models.linear_shares import LinearShare, StoredPart, stored_parts
from penstock.services.worker.models.linear_specification import LinearSpecification
from penstock.services.worker.quantization.fp8 import Fp8Format
from penstock.services.worker.quantization.gguf import GgufFormat
from penstock.services.worker.quantization.online import OnlineFormat
from penstock.services.worker.quantization.packed_integers import AwqFormat
from penstock.services.worker.quantization.reading import read_quantization

OUTPUTS, INPUTS = 256, 512


def part_of(format: Any, rows: range, columns: range = range(INPUTS)) -> StoredPart:
    whole = LinearSpecification(INPUTS, (OUTPUTS,), ("w",), formats=(format,))
    (found,) = stored_parts(whole, LinearShare(whole, {"w": [rows]}, columns))
    return found


def at_ranges(ranges: list[range]) -> tuple[slice, ...]:
    return tuple(slice(each.start, each.stop) for each in ranges)


@pytest.mark.parametrize("rows", [range(128), range(128, 256), range(70, 200), range(256, 256)])
@pytest.mark.parametrize("columns", [range(INPUTS), range(256, 512)])
@pytest.mark.parametrize("form", WRITERS)
def test_what_is_read_for_a_part_of_a_weight_makes_its_numbers(
    form: str, rows: range, columns: range, tmp_path: Any
) -> None:
    writer = WRITERS[form]
    ordered = form.endswith("-ordered")
    if ordered and len(columns) < INPUTS:
        pytest.skip("no rank has a part of groups whose inputs lie anywhere")
    info: Any = SimpleNamespace(
        folder=tmp_path, config={"quantization_config": writer.config}, tie_word_embeddings=False
    )
    quantization = read_quantization(info)
    assert quantization is not None
    weight = torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(5))
    stored = writer.store(weight)
    part = part_of(quantization.format_of("model.layers.0.mlp.up_proj"), rows, columns)
    tensors = {
        kind: tensor[at_ranges(part.entries(part.tensors[kind], tensor.shape))]
        for kind, tensor in stored.tensors.items()
    }
    if not ordered:
        tensors = {kind: each for kind, each in tensors.items() if not kind.endswith("g_idx")}
    assert part.format is not None
    made = part.format.weight(tensors, len(part.outputs), len(part.inputs))
    assert isinstance(made, QuantizedWeight)
    numbers = made.part(*part.kept).dequantized()
    wanted = stored.weight[rows.start : rows.stop, columns.start : columns.stop]
    torch.testing.assert_close(numbers, wanted)


def test_a_part_is_read_from_and_to_where_tensors_can_be_cut() -> None:
    awq = part_of(AwqFormat(4, 128), range(5, 11), range(128, 256))
    assert (awq.outputs, awq.inputs) == (range(16), range(128, 256))
    assert awq.kept == (range(5, 11), range(128))
    qweight = awq.tensors[".qweight"]
    assert awq.entries(qweight, (INPUTS, OUTPUTS // 8)) == [range(128, 256), range(2)]
    blocks = part_of(Fp8Format((128, 128)), range(64, 128))
    assert (blocks.outputs, blocks.kept[0]) == (range(128), range(64, 128))


def test_a_scale_of_all_numbers_is_read_for_any_part() -> None:
    part = part_of(Fp8Format(), range(128, 256), range(256, 512))
    scale = part.tensors[".weight_scale"]
    shapes = [(), (1,), (OUTPUTS,), (OUTPUTS, 1)]
    assert [part.entries(scale, shape) for shape in shapes] == [
        [], [range(1)], [range(128, 256)], [range(128, 256), range(1)],
    ]  # fmt: skip


def test_who_rounds_weights_reads_all_numbers_of_a_scale() -> None:
    half = range(128, 256)
    inputs = [
        part_of(OnlineFormat(kind), range(OUTPUTS), half).inputs for kind in ("int8", "fp8", "int4")
    ]
    assert inputs == [range(INPUTS), range(INPUTS), half]


def test_heads_whose_rows_lie_in_pairs_are_read_whole() -> None:
    part = part_of(GgufFormat("Q4_K", heads=4), range(64, 96), range(256, 512))
    assert (part.outputs, part.inputs) == (range(64, 128), range(256, 512))
    assert part.format == GgufFormat("Q4_K", heads=1)
    assert part.entries(part.tensors[".weight"], (OUTPUTS, 2 * 144)) == [
        range(64, 128), range(144, 288),
    ]  # fmt: skip
