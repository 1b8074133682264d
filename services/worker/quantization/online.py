"""Weights that are quantized while they are read: ``--quantization`` for a folder of plain ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from penstock.services.worker.quantization.format import (
    WEIGHT,
    Form,
    Format,
    StoredTensor,
    plain_tensor,
)

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.kernels.quantized_weight import QuantizedWeight

_INT4_GROUPS = (128, 64, 32)
"""The first that divides the inputs."""


class OnlineFormat(Format, frozen=True):
    kind: Literal["int8", "int4", "fp8"]

    @property
    def title(self) -> str:
        return f"{self.kind}, quantized while it is read"

    @property
    def quantizes_rows(self) -> bool:
        return self.kind == "fp8"

    def tensors(self, outputs: int, inputs: int) -> dict[str, StoredTensor]:
        """What shares a scale is read together: of int8 and fp8 a whole row."""
        return {WEIGHT: plain_tensor(outputs, inputs, self.form(outputs, inputs).group or inputs)}

    def form(self, outputs: int, inputs: int) -> Form:
        """int4 where the inputs have groups, else int8."""
        if self.kind != "int4":
            return Form(self.kind, 0)
        group = next((each for each in _INT4_GROUPS if inputs % each == 0), 0)
        return Form("int4", group, 1, 2) if group else Form("int8", 0)

    def weight(self, tensors: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        from penstock.kernels.quantized_weight import quantized

        form = self.form(outputs, inputs)
        return quantized(tensors[WEIGHT], form.kind, form.group)
