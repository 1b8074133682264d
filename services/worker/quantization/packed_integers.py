"""Integer weights packed into int32 words: GPTQ, AWQ, and compressed-tensors' pack-quantized.

| format | words | zero |
| --- | --- | --- |
| GPTQ | along inputs, [K / 8, N]; scales [G, N] | stored + 1, in version 2 stored; words along N |
| AWQ | along outputs, [K, N / 8], in the order 0 2 4 6 1 3 5 7 | stored, packed likewise |
| pack-quantized | along inputs, [N, K / 8]; scales [N, G] | stored, words along N; or the middle |

Sources: AutoGPTQ ``qlinear_cuda.py``, GPTQModel's ``gptq_v2`` format, AutoAWQ ``WQLinear_GEMM``,
compressed-tensors ``pack_quantized``. Numbers are (code - zero) * scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.services.worker.quantization.format import (
    INPUTS,
    OUTPUTS,
    Axis,
    Form,
    Format,
    StoredTensor,
    groups_of,
    inputs_in,
    scales,
)

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.kernels.quantized_kinds import Kind
    from penstock.kernels.quantized_weight import QuantizedWeight

_WORDS = ("I32",)
_SHAPE = ".weight_shape"


class PackedIntegers(Format, frozen=True):
    """What the three have in common."""

    bits: int
    group: int
    """Inputs of a group; -1: all."""

    @property
    def each(self) -> int:
        """Codes of a word."""
        return 32 // self.bits

    def _axes(self, inputs: int) -> tuple[Axis, Axis, Axis]:
        """Of words along outputs, of words along inputs, and of groups."""
        words = Axis("outputs", self.each), Axis("inputs", self.each)
        return *words, inputs_in(self.group, inputs)

    def _form(self, inputs: int, *, zeros: bool, ordered: bool) -> Form:
        group = inputs if self.group < 0 else min(self.group, inputs)
        kind: Kind = "int4" if self.bits == 4 else "int8"
        if kind == "int8" and group == inputs and not zeros:
            return Form("int8", 0)
        return Form(kind, group, 1, 2, zeros, ordered)

    def _why_not(self, outputs: int, inputs: int, packed_outputs: bool) -> str:
        if self.group > 0 and inputs % self.group:
            return f"{inputs} inputs are no groups of {self.group}"
        if inputs % self.each:
            return f"{inputs} inputs are no words of {self.each} codes"
        if packed_outputs and outputs % self.each:
            return f"{outputs} outputs are no words of {self.each} codes"
        return ""

    def _weight(
        self, codes: Tensor, scale: Tensor, zeros: Tensor | None, order: Tensor | None
    ) -> QuantizedWeight:
        """codes: uint8 [N, K]; scale: [G, N]; zeros: uint8 codes [G, N]; order: as in
        ``QuantizedWeight``, of the codes' columns."""
        import torch

        from penstock.kernels.quantized_weight import INT4_ZERO, QuantizedWeight, in_half_bytes

        middle = INT4_ZERO if self.bits == 4 else 128
        if zeros is not None and bool((zeros == middle).all()):
            zeros = None
        if order is not None:
            codes = codes[:, order]
        inputs = codes.shape[1]
        group = inputs if self.group < 0 else min(self.group, inputs)
        scale = scale.contiguous()
        wide = None if zeros is None else zeros.to(torch.int16)
        if self.bits == 4:
            packed = in_half_bytes(codes)
            return QuantizedWeight("int4", packed, group, scale, 1, wide, None, order)
        signed = (codes ^ 128).view(torch.int8)
        if wide is None and group == inputs:
            factor = scale[0].float()
            return QuantizedWeight("int8", signed, inputs, factor=factor, order=order)
        wide = None if wide is None else wide - 128
        return QuantizedWeight("int8", signed, group, scale, 1, wide, None, order)


class GptqFormat(PackedIntegers, frozen=True):
    ordered: bool = False
    """Whether ``g_idx`` must be there (``desc_act``)."""
    first_zero: int = 1
    """What is added to stored zeros."""
    symmetric: bool = True
    """Whether all zeros are the middle, and need not be kept."""

    @property
    def title(self) -> str:
        return f"GPTQ, {self.bits} bits {grouped(self.group)}"

    def why_not(self, outputs: int, inputs: int) -> str:
        return self._why_not(outputs, inputs, packed_outputs=True)

    def tensors(self, outputs: int, inputs: int) -> dict[str, StoredTensor]:
        groups, each = groups_of(inputs, self.group), self.each
        of, (words, packed, grouped_inputs) = self.title, self._axes(inputs)
        return {
            ".qweight": StoredTensor(
                ((inputs // each, outputs),), _WORDS, "codes", of=of, axes=(packed, OUTPUTS)
            ),
            ".qzeros": StoredTensor(
                ((groups, outputs // each),), _WORDS, "zeros", of=of, axes=(grouped_inputs, words)
            ),
            ".scales": scales((groups, outputs), of=of, axes=(grouped_inputs, OUTPUTS)),
            ".g_idx": StoredTensor(
                ((inputs,),), _WORDS, "order", not self.ordered, self.group, of=of, axes=(INPUTS,)
            ),
        }

    def form(self, outputs: int, inputs: int) -> Form:
        return self._form(inputs, zeros=not self.symmetric, ordered=self.ordered)

    def weight(self, tensors: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        from penstock.kernels.packed_codes import along_columns, along_rows, order_of

        codes = along_rows(tensors[".qweight"], self.bits).t().contiguous()
        zeros = along_columns(tensors[".qzeros"], self.bits).short() + self.first_zero
        order = order_of(tensors.get(".g_idx"))
        return self._weight(codes, tensors[".scales"], zeros, order)


class AwqFormat(PackedIntegers, frozen=True):
    """Of the version GEMM."""

    @property
    def title(self) -> str:
        return f"AWQ, {self.bits} bits {grouped(self.group)}"

    def why_not(self, outputs: int, inputs: int) -> str:
        return self._why_not(outputs, inputs, packed_outputs=True)

    def tensors(self, outputs: int, inputs: int) -> dict[str, StoredTensor]:
        groups, width = groups_of(inputs, self.group), outputs // self.each
        of, (words, _, grouped_inputs) = self.title, self._axes(inputs)
        return {
            ".qweight": StoredTensor(
                ((inputs, width),), _WORDS, "codes", of=of, axes=(INPUTS, words)
            ),
            ".qzeros": StoredTensor(
                ((groups, width),), _WORDS, "zeros", of=of, axes=(grouped_inputs, words)
            ),
            ".scales": scales((groups, outputs), of=of, axes=(grouped_inputs, OUTPUTS)),
        }

    def form(self, outputs: int, inputs: int) -> Form:
        return self._form(inputs, zeros=True, ordered=False)

    def weight(self, tensors: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        from penstock.kernels.packed_codes import interleaved_columns

        codes = interleaved_columns(tensors[".qweight"]).t().contiguous()
        zeros = interleaved_columns(tensors[".qzeros"]).short()
        return self._weight(codes, tensors[".scales"], zeros, None)


class PackQuantized(PackedIntegers, frozen=True):
    """Of compressed-tensors."""

    symmetric: bool = True
    ordered: bool = False
    """Whether ``weight_g_idx`` must be there (``actorder``: group)."""

    @property
    def title(self) -> str:
        return f"pack-quantized, {self.bits} bits {grouped(self.group)}"

    def why_not(self, outputs: int, inputs: int) -> str:
        return self._why_not(outputs, inputs, packed_outputs=not self.symmetric)

    def tensors(self, outputs: int, inputs: int) -> dict[str, StoredTensor]:
        groups, each, of = groups_of(inputs, self.group), self.each, self.title
        words, packed, grouped_inputs = self._axes(inputs)
        found = {
            ".weight_packed": StoredTensor(
                ((outputs, inputs // each),), _WORDS, "codes", of=of, axes=(OUTPUTS, packed)
            ),
            ".weight_scale": scales((outputs, groups), of=of, axes=(OUTPUTS, grouped_inputs)),
            _SHAPE: StoredTensor(((2,),), ("I64", "I32"), "shape", True, says=(outputs, inputs)),
            ".weight_g_idx": StoredTensor(
                ((inputs,),), _WORDS, "order", not self.ordered, self.group, of=of, axes=(INPUTS,)
            ),
        }
        if not self.symmetric:
            shape = (-(-outputs // each), groups)
            found[".weight_zero_point"] = StoredTensor(
                (shape,), _WORDS, "zeros", of=of, axes=(words, grouped_inputs)
            )
        return found

    def form(self, outputs: int, inputs: int) -> Form:
        return self._form(inputs, zeros=not self.symmetric, ordered=self.ordered)

    def weight(self, tensors: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        from penstock.kernels.packed_codes import along_columns, along_rows, order_of

        codes, zeros = along_columns(tensors[".weight_packed"], self.bits), None
        if not self.symmetric:
            zeros = along_rows(tensors[".weight_zero_point"], self.bits).t().short()
        scale, order = tensors[".weight_scale"].t(), order_of(tensors.get(".weight_g_idx"))
        return self._weight(codes, scale, zeros, order)


def grouped(group: int) -> str:
    return "with a scale a row" if group < 0 else f"in groups of {group}"
