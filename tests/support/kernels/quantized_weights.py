"""Random weights in every form that quantized ones have."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.gpu.word_weight import WordWeight, word_weight
from penstock.kernels.quantized_weight import QuantizedWeight, quantized


def quantized_weights(outputs: int, inputs: int) -> dict[str, QuantizedWeight]:
    """inputs: a multiple of 192."""
    generator = torch.Generator().manual_seed(outputs)

    def positive(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator) + 0.5

    def zeros(group: int) -> Tensor:
        shape = (-(-inputs // group), outputs)
        return torch.randint(0, 17, shape, generator=generator).to(torch.int16)

    def offsets(group: int) -> Tensor:
        return torch.randn(inputs // group, outputs, generator=generator)

    weight = torch.randn(outputs, inputs, generator=generator)
    halves = torch.randint(0, 256, (outputs, inputs // 2), generator=generator, dtype=torch.uint8)
    order = torch.randperm(inputs, generator=generator)
    fp8 = quantized(weight, "fp8").codes
    int8 = quantized(weight, "int8").codes
    blocks = positive(-(-inputs // 128), -(-outputs // 32))
    small = (positive(inputs // 16, outputs) * 3).to(torch.float8_e4m3fn)
    powers = torch.exp2(torch.randint(-3, 4, (inputs // 32, outputs), generator=generator).float())
    return {
        "int8, a scale a row": quantized(weight, "int8"),
        "int8 in groups with zeros": QuantizedWeight(
            "int8", int8, 64, positive(inputs // 64, outputs), 1, zeros(64)
        ),
        "int8 with a zero a row": QuantizedWeight(
            "int8", int8, inputs, positive(1, outputs), 1, zeros(inputs), None, order
        ),
        "int4 in groups of 32": quantized(weight, "int4", 32),
        "int4 in groups of half the width and more": quantized(weight, "int4", inputs),
        "int4 in groups of 96": quantized(weight, "int4", 96),
        "int4 with zeros, its inputs in an order": QuantizedWeight(
            "int4", halves, 64, positive(inputs // 64, outputs).half(), 1, zeros(64), None, order
        ),
        "int4 in small groups with zeros and a factor": QuantizedWeight(
            "int4", halves, 32, positive(inputs // 32, outputs).half(), 1, zeros(32),
            positive(outputs),
        ),
        "int4 in groups of 32 with offsets": QuantizedWeight(
            "int4", halves, 32, positive(inputs // 32, outputs), offsets=offsets(32)
        ),
        "int8 in groups of 16 with offsets": QuantizedWeight(
            "int8", int8, 16, positive(inputs // 16, outputs), offsets=offsets(16)
        ),
        "fp8, a scale a row": quantized(weight, "fp8"),
        "fp8 in blocks": QuantizedWeight("fp8", fp8, 128, blocks, 32),
        "fp4 in groups of 16": QuantizedWeight(
            "fp4", halves, 16, small, 1, None, positive(outputs)
        ),
        "fp4 in groups of 32": QuantizedWeight("fp4", halves, 32, powers.bfloat16()),
    }  # fmt: skip


KINDS = list(quantized_weights(16, 192))


def in_words(weight: QuantizedWeight, device: torch.device) -> WordWeight:
    moved = [each.to(device) if isinstance(each, Tensor) else each for each in word_weight(weight)]
    return WordWeight(*moved)  # type: ignore[arg-type]
