"""Folders as the library compressed-tensors writes them: its own dequantized weights are the
reference."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from support.worker.quantized_folders import Stored, Writer, write_twins
from support.worker.whole_logits import our_logits
from torch import Tensor

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs

pytestmark = pytest.mark.skipif(
    find_spec("compressed_tensors") is None, reason="could not import 'compressed_tensors'"
)
Folder = Callable[[str], Path]


class Preset(NamedTuple):
    format: str
    weights: dict[str, Any]
    activations: dict[str, Any] | None = None


PER_TOKEN = {"num_bits": 8, "dynamic": True, "strategy": "token"}
PRESETS: dict[str, Preset] = {
    "W4A16": Preset("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 64}),
    "W4A16, asymmetric": Preset(
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
    ),
    "W8A16": Preset("pack-quantized", {"num_bits": 8, "strategy": "channel"}),
    "W8A16, asymmetric": Preset(
        "pack-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}
    ),
    "W8A8": Preset("int-quantized", {"num_bits": 8, "strategy": "channel"}, PER_TOKEN),
    "W8A8, asymmetric, for the tensor": Preset(
        "int-quantized", {"num_bits": 8, "strategy": "tensor", "symmetric": False}
    ),
    "FP8 dynamic": Preset(
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "channel"},
        PER_TOKEN | {"type": "float"},
    ),
    "FP8": Preset("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "FP8 in blocks": Preset(
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
    ),
    "NVFP4A16": Preset(
        "nvfp4-pack-quantized",
        {
            "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
            "scale_dtype": torch.float8_e4m3fn,
        },
    ),
    "MXFP4A16": Preset(
        "mxfp4-pack-quantized",
        {
            "num_bits": 4, "type": "float", "strategy": "group", "group_size": 32,
            "scale_dtype": torch.uint8,
        },
    ),
}  # fmt: skip


IN_14_BITS = ("W8A16", "W8A8")
"""A CPU multiplies them with activations of so many."""
IN_BF16 = ("NVFP4A16",)
"""The library dequantizes them in bf16, and so rounds what ours does not: weights by 0.14 %."""


def limits(weight: Tensor, args: QuantizationArgs) -> tuple[Tensor, Tensor]:
    """The lowest and the highest number of what shares a scale."""
    match args.strategy:
        case "tensor":
            return weight.min().view(1), weight.max().view(1)
        case "channel":
            return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
        case "block":
            (rows, columns), (outputs, inputs) = args.block_structure or (0, 0), weight.shape
            padded = torch.zeros(-(-outputs // rows) * rows, -(-inputs // columns) * columns)
            padded[:outputs, :inputs] = weight
            blocks = padded.view(-1, rows, padded.shape[1] // columns, columns)
            return blocks.amin((1, 3)), blocks.amax((1, 3))
    groups = weight.view(len(weight), -1, args.group_size or 0)
    return groups.amin(-1), groups.amax(-1)


def library_writer(preset: Preset) -> Writer:
    """Imports the library, which takes a second and a half in each process that collects tests."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
    )
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = QuantizationArgs(**preset.weights)
    activations = None if preset.activations is None else QuantizationArgs(**preset.activations)
    scheme = QuantizationScheme(
        targets=["Linear"], weights=args, input_activations=activations, format=preset.format
    )
    compressor: Any = BaseCompressor.get_value_from_registry(preset.format)

    def store(weight: Tensor) -> Stored:
        low, high = limits(weight, args)
        whole = None
        if args.strategy == "tensor_group":
            whole = generate_gparam(low.min(), high.max())
        scale, zero = calculate_qparams(low, high, args, global_scale=whole)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        if whole is not None:
            state["weight_global_scale"] = whole
        packed = compressor.compress(state, scheme)
        numbers = compressor.decompress(dict(packed), scheme)["weight"].float()
        return Stored({f".{name}": tensor for name, tensor in packed.items()}, numbers)

    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=preset.format, ignore=["lm_head"]
    )
    return Writer(config.model_dump(mode="json"), store)


@pytest.mark.parametrize("name", list(PRESETS))
def test_logits_are_those_of_the_librarys_own_dequantized_weights(
    name: str, tiny_folder: Folder, tmp_path: Path
) -> None:
    writer = library_writer(PRESETS[name])
    quantized, plain = write_twins(tiny_folder("llama3-wide"), tmp_path, writer)
    ours, theirs = our_logits(quantized), our_logits(plain)
    if name in IN_14_BITS:
        assert float((ours - theirs).norm() / theirs.norm()) < 2e-3
    elif name in IN_BF16:
        assert float((ours - theirs).norm() / theirs.norm()) < 2e-2
    else:
        torch.testing.assert_close(ours, theirs, rtol=5e-4, atol=5e-4)
