"""``QuantizedWeight``: the one form in which quantized weights are multiplied, and its reference.

    W[n, k] = factor[n] * (scale[g, n // rows] * (code[n, k] - zero[g, n]) + offset[g, n])
    g = k // group

Every format of checkpoints is brought into it without rounding. Codes of four bits lie two in a
byte: column k of the first half of the width in the low bits, column k + K / 2 in the high ones, so
that a tile of bytes is two tiles of weights side by side and nothing has to be interleaved.
Columns may be in another order than the inputs (``order``): those of a group are neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.quantized_kinds import Kind

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of e2m1; the highest bit is the sign (OCP Microscaling Formats 1.0, section 5.3.3)."""
INT4_ZERO = 8
"""The zero of ``int4`` where a weight has no zeros."""
_SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
"""Shares of a group's range that ``quantized`` tries for int4."""
_LEAST = 1e-30
"""Groups of smaller numbers become zeros."""
_PIECE = 1 << 22
"""Numbers that are quantized at once."""


class QuantizedWeight(NamedTuple):
    """[N, K]; all tensors are contiguous and on one device."""

    kind: Kind
    codes: Tensor
    """int4, fp4: uint8 [N, K / 2]; int8: int8 [N, K]; fp8: float8_e4m3fn [N, K]."""
    group: int
    """Columns that share a scale and a zero; K if there are neither."""
    scales: Tensor | None = None
    """[ceil(K / group), ceil(N / rows)], fp32, fp16, bf16 or float8_e4m3fn; ``None``: 1."""
    rows: int = 1
    """Rows that share a scale."""
    zeros: Tensor | None = None
    """int16 [ceil(K / group), N]; ``None``: ``INT4_ZERO`` of int4, else 0."""
    factor: Tensor | None = None
    """fp32 [N]; ``None``: 1."""
    order: Tensor | None = None
    """int64 [K]: which input each column is for; ``None``: its own."""
    offsets: Tensor | None = None
    """fp32 [ceil(K / group), N]; ``None``: 0."""

    @property
    def half_bytes(self) -> bool:
        """Whether two codes share a byte."""
        return self.kind in ("int4", "fp4")

    @property
    def shape(self) -> tuple[int, int]:
        """[outputs, inputs]."""
        outputs, width = self.codes.shape
        return outputs, width * 2 if self.half_bytes else width

    @property
    def num_bytes(self) -> int:
        tensors = (
            self.codes, self.scales, self.zeros, self.factor, self.order, self.offsets,
        )  # fmt: skip
        return sum(each.nbytes for each in tensors if each is not None)

    @property
    def is_finite(self) -> bool:
        """Whether all that codes are multiplied with, and what is added, is."""
        tensors = (self.scales, self.factor, self.offsets)
        return all(bool(each.float().isfinite().all()) for each in tensors if each is not None)

    def columns(self, dtype: torch.dtype, first: int = 0, last: int | None = None) -> Tensor:
        """Rows ``first`` to ``last`` of the weight, its columns in the order of the codes. Computed
        in fp32, rounded once."""
        rows = slice(first, self.shape[0] if last is None else last)
        width = self.shape[1]
        values = self._values(self.codes[rows])
        if self.kind == "int4" and self.zeros is None:
            values -= INT4_ZERO
        if self.zeros is not None:
            values -= self._spread(self.zeros[:, rows].float().t(), width)
        if self.scales is not None:
            at = torch.arange(rows.start, rows.stop, device=self.codes.device) // self.rows
            values *= self._spread(self.scales.float().t()[at], width)
        if self.offsets is not None:
            values += self._spread(self.offsets[:, rows].t(), width)
        if self.factor is not None:
            values *= self.factor[rows, None]
        return values.to(dtype)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[N, K], its columns in the order of the inputs."""
        values = self.columns(dtype)
        if self.order is None:
            return values
        found = torch.empty_like(values)
        found[:, self.order] = values
        return found

    def _values(self, codes: Tensor) -> Tensor:
        """fp32 [n, K]."""
        if not self.half_bytes:
            return codes.float()
        both = torch.cat((codes & 15, codes >> 4), 1)
        if self.kind == "int4":
            return both.float()
        table = torch.tensor([*FP4, *(-value for value in FP4)], device=codes.device)
        return table[both.int()]

    def _spread(self, values: Tensor, width: int) -> Tensor:
        """[n, groups] as [n, width]."""
        return values.repeat_interleave(self.group, 1)[:, :width]

    def multiplied(self, number: float) -> QuantizedWeight:
        """The weight times a number."""
        factor = self.factor
        if factor is None:
            factor = torch.ones(self.shape[0], dtype=torch.float32, device=self.codes.device)
        return self._replace(factor=factor * number)

    def part(self, outputs: range, inputs: range) -> QuantizedWeight:
        """Some consecutive outputs and inputs, as one of several has them that share the weight.

        Raises ``ValueError`` for inputs that are no whole groups, or of which groups have some
        alone (``order``).
        """
        width = self.shape[1]
        rows = self.reordered(torch.arange(outputs.start, outputs.stop))
        ends = (
            outputs.start % self.rows,
            (self.shape[0] - outputs.stop) and outputs.stop % self.rows,
        )
        if rows.scales is not None and not any(ends):  # whole blocks of rows have a scale each
            blocks = _bytes(rows.scales)[:, :: self.rows].contiguous().view(rows.scales.dtype)
            rows = rows._replace(scales=blocks, rows=self.rows)
        if inputs == range(width):
            return rows
        first, last = inputs.start, inputs.stop
        whole = self.group >= width  # so that all tensors have one group
        ends = (first % self.group, 0 if last == width else last % self.group)
        if self.order is not None or (any(ends) and not whole):
            raise ValueError(f"inputs {first} to {last} of {width} are no whole groups")
        groups = slice(first // self.group, -(-last // self.group))

        def of_groups(values: Tensor | None) -> Tensor | None:
            if values is None:
                return None
            return _bytes(values)[groups].contiguous().view(values.dtype)

        codes = _bytes(rows.codes)
        if self.half_bytes:
            both = torch.cat((codes & 15, codes >> 4), 1)
            codes = in_half_bytes(both[:, first:last])
        else:
            codes = codes[:, first:last].contiguous()
        return rows._replace(
            codes=codes.view(self.codes.dtype),
            group=min(self.group, last - first) if whole else self.group,
            scales=of_groups(rows.scales),
            zeros=of_groups(rows.zeros),
            offsets=of_groups(rows.offsets),
        )

    def reordered(self, rows: Tensor) -> QuantizedWeight:
        """A weight of these rows, int64 [M], in their order."""
        rows = rows.to(self.codes.device)
        return self._replace(
            codes=_rows_of(self.codes, rows),
            scales=None if self.scales is None else _at(self.scales, rows // self.rows),
            rows=1,
            zeros=None if self.zeros is None else _at(self.zeros, rows),
            factor=None if self.factor is None else self.factor[rows],
            offsets=None if self.offsets is None else _at(self.offsets, rows),
        )


def _bytes(values: Tensor) -> Tensor:
    """8-bit floats as what torch has all operations for; others as they are."""
    return values.view(torch.uint8) if values.dtype == torch.float8_e4m3fn else values


def _rows_of(codes: Tensor, rows: Tensor) -> Tensor:
    return codes.view(torch.uint8)[rows].view(codes.dtype)


def _at(values: Tensor, columns: Tensor) -> Tensor:
    """Columns of scales or zeros; torch has no index of 8-bit floats."""
    if values.dtype.itemsize == 1:
        return values.view(torch.uint8)[:, columns].contiguous().view(values.dtype)
    return values[:, columns].contiguous()


def joined(parts: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """Weights below each other as one; ``None`` where they cannot be one."""
    first = parts[0]
    if len(parts) == 1:
        return first
    for part in parts[1:]:
        alike = (part.kind, part.group, part.shape[1]) == (first.kind, first.group, first.shape[1])
        if not alike or not _same_order(part.order, first.order):
            return None
        if (part.offsets is None) != (first.offsets is None):
            return None
        scales = [each.scales for each in (first, part)]
        if (scales[0] is None) != (scales[1] is None):
            return None
        if scales[0] is not None and scales[1] is not None and scales[0].dtype != scales[1].dtype:
            return None
    whole = all(part.rows == first.rows and part.shape[0] % part.rows == 0 for part in parts)
    parts = parts if whole else [_with_scales_of_rows(part) for part in parts]
    has_zeros = any(part.zeros is not None for part in parts)
    has_factor = any(part.factor is not None for part in parts)
    scales = [part.scales for part in parts]
    offsets = [part.offsets for part in parts if part.offsets is not None]
    return QuantizedWeight(
        first.kind,
        _joined_bytes([part.codes for part in parts], 0),
        first.group,
        None if first.scales is None else _joined_bytes([s for s in scales if s is not None], 1),
        parts[0].rows,
        torch.cat([_zeros(part) for part in parts], 1) if has_zeros else None,
        torch.cat([_factor(part) for part in parts]) if has_factor else None,
        first.order,
        torch.cat(offsets, 1) if offsets else None,
    )


def _joined_bytes(tensors: Sequence[Tensor], dim: int) -> Tensor:
    dtype = tensors[0].dtype
    if dtype.itemsize > 1:
        return torch.cat(list(tensors), dim)
    return torch.cat([each.view(torch.uint8) for each in tensors], dim).view(dtype)


def _same_order(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def _with_scales_of_rows(weight: QuantizedWeight) -> QuantizedWeight:
    if weight.scales is None or weight.rows == 1:
        return weight._replace(rows=1)
    at = torch.arange(weight.shape[0], device=weight.codes.device) // weight.rows
    return weight._replace(scales=_at(weight.scales, at), rows=1)


def _zeros(weight: QuantizedWeight) -> Tensor:
    if weight.zeros is not None:
        return weight.zeros
    zero = INT4_ZERO if weight.kind == "int4" else 0
    shape = (-(-weight.shape[1] // weight.group), weight.shape[0])
    return torch.full(shape, zero, dtype=torch.int16, device=weight.codes.device)


def _factor(weight: QuantizedWeight) -> Tensor:
    if weight.factor is not None:
        return weight.factor
    return torch.ones(weight.shape[0], dtype=torch.float32, device=weight.codes.device)


def in_half_bytes(codes: Tensor) -> Tensor:
    """Codes of four bits, uint8 [N, K], two in a byte: [N, K / 2]. K is even."""
    half = codes.shape[1] // 2
    return codes[:, :half] | (codes[:, half:] << 4)


def quantized(weight: Tensor, kind: Kind, group: int = 0) -> QuantizedWeight:
    """A weight [N, K] of any float type, rounded; group: columns of a scale, 0: one scale a row.

    int8, fp8: the largest number of a row is the largest code. int4: of six ranges, from all that a
    group spans to three quarters of it, the one with the least squared error; scales are bf16, and
    negative where a group's farthest number is positive.
    """
    parts = [
        _quantized_rows(rows.float(), kind, group)
        for rows in torch.split(weight, max(1, _PIECE // weight.shape[1]))
    ]
    found = joined(parts)
    if found is None:
        raise ValueError(f"rows of a weight in {kind} differ")
    return found


def _quantized_rows(weight: Tensor, kind: Kind, group: int) -> QuantizedWeight:
    width = weight.shape[1]
    if kind in ("int8", "fp8") and not group:
        most = 127.0 if kind == "int8" else 448.0
        factor = (weight.abs().amax(1) / most).clamp_min(1e-12)
        scaled = weight / factor[:, None]
        codes = scaled.round_().to(torch.int8) if kind == "int8" else scaled.to(torch.float8_e4m3fn)
        return QuantizedWeight(kind, codes, width, factor=factor)
    group = group or width
    if kind != "int4" or width % 2 or width % group:
        raise ValueError(f"{kind} in groups of {group} for {width} inputs")
    groups = weight.view(len(weight), -1, group)
    codes, scales = _best_int4(groups)
    codes = codes.view(len(weight), width)
    return QuantizedWeight("int4", in_half_bytes(codes), group, scales.t().contiguous())


def _best_int4(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, uint8 of the shape of ``groups`` [N, G, group], and scales, bf16 [N, G]."""
    # The number that is farthest from 0 gets the code -8, of which there is no positive twin.
    farthest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))[..., 0]
    span = torch.where(farthest.abs() < _LEAST, 1.0, farthest / -8.0)
    best: tuple[Tensor, Tensor, Tensor] | None = None
    for share in _SHRINK:
        scale = (span * share).to(torch.bfloat16)
        wide = scale.float()[..., None]
        codes = (groups / wide).round_().clamp_(-8, 7)
        error = (codes * wide - groups).square_().sum(-1)
        shifted = (codes + INT4_ZERO).to(torch.uint8)
        if best is None:
            best = error, shifted, scale
            continue
        better = error < best[0]
        best = (
            torch.where(better, error, best[0]),
            torch.where(better[..., None], shifted, best[1]),
            torch.where(better, scale, best[2]),
        )
    if best is None:
        raise ValueError("no range was tried")
    return best[1], best[2]
