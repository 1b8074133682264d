"""FP4 (e2m1) weights: NVFP4, in groups of 16 with e4m3 scales and one more scale for the tensor,
and MXFP4, in groups of 32 with scales that are powers of two (e8m0).

Two codes lie in a byte, the first in its low bits. A number is its code times the group's scale;
NVFP4: times ``weight_scale_2`` (ModelOpt), or divided by ``weight_global_scale``
(compressed-tensors).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.services.worker.quantization.format import (
    OUTPUTS,
    Axis,
    Form,
    Format,
    StoredTensor,
    scales,
)

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.kernels.quantized_weight import QuantizedWeight

NVFP4_GROUP, MXFP4_GROUP = 16, 32
_SCALE = ".weight_scale"


class Fp4Format(Format, frozen=True):
    group: int
    codes: str = ".weight_packed"
    whole: str = ""
    """Name of the tensor's scale; empty: none, and groups' scales are powers of two."""
    divided: bool = False
    """Whether numbers are divided by the tensor's scale."""

    @property
    def title(self) -> str:
        return f"{'NVFP4' if self.whole else 'MXFP4'} in groups of {self.group}"

    def why_not(self, outputs: int, inputs: int) -> str:
        return f"{inputs} inputs are no groups of {self.group}" if inputs % self.group else ""

    def tensors(self, outputs: int, inputs: int) -> dict[str, StoredTensor]:
        shape = (outputs, inputs // self.group)
        types = ("F8_E4M3",) if self.whole else ("U8", "F8_E8M0")
        found = {
            self.codes: StoredTensor(
                ((outputs, inputs // 2),), ("U8",), "codes", axes=(OUTPUTS, Axis("inputs", 2))
            ),
            _SCALE: StoredTensor(
                (shape,), types, "scales", of=self.title, axes=(OUTPUTS, Axis("inputs", self.group))
            ),
        }
        if self.whole:
            found[self.whole] = scales((), (1,), role="factor")
        for unused in (".input_scale", ".input_global_scale"):
            found[unused] = scales((), (1,), optional=True)
        return found

    def form(self, outputs: int, inputs: int) -> Form:
        return Form("fp4", self.group, 1, 1 if self.whole else 2, factor=bool(self.whole))

    def weight(self, tensors: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        import torch

        from penstock.kernels.quantized_weight import QuantizedWeight, in_half_bytes

        stored = tensors[self.codes]
        codes = in_half_bytes(torch.stack((stored & 15, stored >> 4), -1).flatten(1))
        scale, factor = tensors[_SCALE].view(torch.uint8).t().contiguous(), None
        if self.whole:
            number = tensors[self.whole].float().reshape(1)
            factor = (1.0 / number if self.divided else number).expand(outputs).contiguous()
            grouped = scale.view(torch.float8_e4m3fn)
        else:
            grouped = torch.exp2(scale.float() - 127.0).to(torch.bfloat16)
        return QuantizedWeight("fp4", codes, self.group, grouped, factor=factor)
