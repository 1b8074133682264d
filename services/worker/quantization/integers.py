"""Integers of eight bits as they are: int-quantized and naive-quantized of compressed-tensors.

Where activations are quantized, as W8A8 checkpoints expect, each row has a scale of its own: stored
ones are checked and not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.services.worker.quantization.format import (
    INPUTS,
    OUTPUTS,
    WEIGHT,
    Form,
    Format,
    StoredTensor,
    groups_of,
    inputs_in,
    scales,
)
from penstock.services.worker.quantization.packed_integers import grouped

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.kernels.quantized_weight import QuantizedWeight

_SCALE, _ZEROS = ".weight_scale", ".weight_zero_point"


class Int8Format(Format, frozen=True):
    group: int = -1
    """Inputs of a group; -1: all."""
    symmetric: bool = True
    activations: bool = False
    """Whether they are quantized, too, where that is faster."""

    @property
    def quantizes_rows(self) -> bool:
        return self.activations

    @property
    def title(self) -> str:
        return f"int8 {grouped(self.group)}"

    def why_not(self, outputs: int, inputs: int) -> str:
        if self.group > 0 and inputs % self.group:
            return f"{inputs} inputs are no groups of {self.group}"
        return ""

    def tensors(self, outputs: int, inputs: int) -> dict[str, StoredTensor]:
        shapes: tuple[tuple[int, ...], ...] = ((outputs, groups_of(inputs, self.group)),)
        if self.group < 0:
            shapes += ((), (1,), (outputs,))
        axes = (OUTPUTS, inputs_in(self.group, inputs))
        found = {
            WEIGHT: StoredTensor(((outputs, inputs),), ("I8",), "codes", axes=(OUTPUTS, INPUTS)),
            _SCALE: scales(*shapes, of=self.title, axes=axes),
            ".input_scale": scales((), (1,), optional=True),
            ".input_zero_point": StoredTensor(((), (1,)), ("I8", "I32"), "zeros", True),
        }
        if not self.symmetric:
            found[_ZEROS] = StoredTensor(shapes, ("I8",), "zeros", of=self.title, axes=axes)
        return found

    def form(self, outputs: int, inputs: int) -> Form:
        if self.group < 0 and self.symmetric:
            return Form("int8", 0)
        return Form("int8", inputs if self.group < 0 else self.group, zeros=not self.symmetric)

    def weight(self, tensors: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        import torch

        from penstock.kernels.quantized_weight import QuantizedWeight

        def of_groups(values: Tensor) -> Tensor:
            wide = values if values.dim() == 2 else values.reshape(-1, 1)
            return wide.expand(outputs, -1).t().contiguous()

        scale = of_groups(tensors[_SCALE]).float()
        if self.symmetric and self.group < 0:
            return QuantizedWeight("int8", tensors[WEIGHT], inputs, factor=scale[0])
        zeros = None if self.symmetric else of_groups(tensors[_ZEROS]).to(torch.int16)
        group = inputs if self.group < 0 else self.group
        return QuantizedWeight("int8", tensors[WEIGHT], group, scale, 1, zeros)
