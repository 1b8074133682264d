"""Quantized linear layers of a model on a GPU: words for its fast kernels, and what is said of
them; and layers that have forms alone, of whose kernels nothing else is needed.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from penstock.kernels.gpu.word_weight import WordWeight
from penstock.kernels.quantized_kinds import SPACE_BYTES
from penstock.kernels.quantized_weight import QuantizedWeight
from penstock.services.worker.models.linear import Linear
from penstock.services.worker.models.linear_specification import KeptPart, LinearSpecification
from penstock.services.worker.models.quantized_linear import QuantizedLinear, plain_part
from penstock.services.worker.quantization.format import Form

_CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_SCALES = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32}
"""By bytes; float16 has as many as bfloat16."""


def give_words(linears: Iterable[Linear]) -> None:
    """Bring quantized weights on a GPU into the form that its fast kernels read, once they are
    multiplied and reordered. A weight of four bits is in memory twice meanwhile, one at a time."""
    coded = [each for each in linears if isinstance(each, QuantizedLinear)]
    if coded:
        space = torch.empty(SPACE_BYTES, dtype=torch.uint8, device=coded[0].device)
        for linear in coded:
            linear.take_words(space)


def words_of_products(linears: Iterable[Linear]) -> str:
    """What multiplies the quantized weights on a GPU, for the log; empty: none is in codes."""
    coded = [each for each in linears if isinstance(each, QuantizedLinear)]
    reasons = collections.Counter[str]()
    for each in coded:
        reasons.update(each.slow)
    fast = sum(isinstance(piece, WordWeight) for each in coded for piece in each.pieces)
    if not fast and not reasons:
        return ""
    slow = [f"{count} by the slower one for any form ({why})" for why, count in reasons.items()]
    return "; products: " + ", ".join([f"{fast} by kernels for words", *slow])


def with_forms(
    specification: LinearSpecification,
    parts: Sequence[KeptPart],
    dtype: torch.dtype,
    device: torch.device,
    *,
    quantizes: bool,
) -> QuantizedLinear:
    """A layer whose weight has these forms, uninitialized; quantizes: see ``QuantizedLinear``."""
    linear = QuantizedLinear(specification, dtype, device)
    linear.quantizes = quantizes
    inputs = specification.inputs
    for outputs, form in parts:
        if form is None:
            plain = torch.empty(outputs, inputs, dtype=dtype, device=device)
            linear.pieces.append(plain_part(plain, "part"))
        else:
            linear.pieces.append(_empty(form, outputs, inputs, device))
    return linear


def _empty(form: Form, outputs: int, inputs: int, device: torch.device) -> QuantizedWeight:
    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    group, halves = form.group or inputs, form.kind in ("int4", "fp4")
    count, scale = -(-inputs // group), _SCALES[form.scale_bytes]
    return QuantizedWeight(
        form.kind,
        empty(_CODES.get(form.kind, torch.uint8), outputs, inputs // 2 if halves else inputs),
        group,
        empty(scale, count, -(-outputs // form.rows)) if form.group else None,
        form.rows,
        empty(torch.int16, count, outputs) if form.zeros else None,
        empty(torch.float32, outputs) if form.factor or not form.group else None,
        torch.arange(inputs, device=device) if form.ordered else None,
        empty(torch.float32, count, outputs) if form.offsets else None,
    )
