"""FP8 (e4m3) weights with one scale for a tensor, a row or a block.

As in checkpoints of ``quant_method`` fp8, fbgemm_fp8, modelopt and compressed-tensors: a number is
its code times the scale; ``weight_scale_inv`` of blocks is that scale too, whatever it is called
(DeepSeek-V3, inference/kernel.py, ``weight_dequant``). Where activations are quantized, each row
has a scale of its own, so that stored ones are checked and not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.services.worker.quantization.format import (
    INPUTS,
    OUTPUTS,
    WEIGHT,
    Axis,
    Form,
    Format,
    StoredTensor,
    scales,
)

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.kernels.quantized_weight import QuantizedWeight

_INPUT = ".input_scale"


class Fp8Format(Format, frozen=True):
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale; ``None``: all of a row, or of the tensor."""
    scale: str = ".weight_scale"
    activations: bool = True
    """Whether they are quantized, too, where the device multiplies FP8."""

    @property
    def title(self) -> str:
        if self.block is None:
            return "FP8 with a scale a row or tensor"
        return f"FP8 in blocks of {self.block[0]} x {self.block[1]}"

    @property
    def quantizes_rows(self) -> bool:
        return self.activations

    def tensors(self, outputs: int, inputs: int) -> dict[str, StoredTensor]:
        if self.block is None:
            shapes: tuple[tuple[int, ...], ...] = ((), (1,), (outputs, 1), (outputs,))
            axes: tuple[Axis, ...] = (OUTPUTS,)
        else:
            rows, columns = self.block
            shapes = ((-(-outputs // rows), -(-inputs // columns)),)
            axes = (Axis("outputs", rows), Axis("inputs", columns))
        return {
            WEIGHT: StoredTensor(
                ((outputs, inputs),), ("F8_E4M3",), "codes", axes=(OUTPUTS, INPUTS)
            ),
            self.scale: scales(*shapes, of=self.title, axes=axes),
            _INPUT: scales((), (1,), optional=True),
        }

    def form(self, outputs: int, inputs: int) -> Form:
        if self.block is None:
            return Form("fp8", 0)
        rows, columns = self.block
        return Form("fp8", min(columns, inputs), rows)

    def weight(self, tensors: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        from penstock.kernels.quantized_weight import QuantizedWeight

        scale, codes = tensors[self.scale].float(), tensors[WEIGHT]
        if self.block is None:
            factor = scale.reshape(-1).expand(outputs).contiguous()
            return QuantizedWeight("fp8", codes, inputs, factor=factor)
        rows, columns = self.block
        return QuantizedWeight(
            "fp8", codes, min(columns, inputs), scale.t().contiguous(), min(rows, outputs)
        )
