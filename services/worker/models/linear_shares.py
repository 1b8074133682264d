"""Which outputs and inputs of a linear layer a rank has, and what it reads for them. Needs no
torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from penstock.services.worker.models.linear_specification import LinearSpecification
from penstock.services.worker.models.rank_shares import RankPlace, part_of
from penstock.services.worker.quantization.format import (
    WEIGHT,
    Format,
    StoredTensor,
    plain_tensor,
)


class LinearShare(NamedTuple):
    """A rank's part of a layer, in the numbers of the whole one."""

    whole: LinearSpecification
    outputs: dict[str, list[range]]
    """By names in a checkpoint, whose rows they count; several of a name that has parts."""
    inputs: range


class StoredPart(NamedTuple):
    """What is read of a weight that a checkpoint names, in the numbers of the whole one: a part
    with ends where its tensors can be cut."""

    name: str
    format: Format | None
    """Of the part; ``None``: plain."""
    tensors: Mapping[str, StoredTensor]
    """Of the whole weight, by what follows its name."""
    size: tuple[int, int]
    """Outputs and inputs of the whole weight."""
    outputs: range
    inputs: range
    kept: tuple[range, range]
    """Of the outputs and inputs that are read, counted from the first of them."""

    @property
    def divides_inputs(self) -> bool:
        return len(self.inputs) < self.size[1]

    def entries(self, tensor: StoredTensor, shape: Sequence[int]) -> list[range]:
        """Of each dimension of a tensor of this shape, what belongs to the part."""
        found = [range(length) for length in shape]
        for at, (axis, length) in enumerate(zip(tensor.axes, shape, strict=False)):
            total, part = (
                (self.size[0], self.outputs)
                if axis.of == "outputs"
                else (self.size[1], self.inputs)
            )
            found[at] = axis.entries_of(total, part, length)
        return found


def stored_parts(whole: LinearSpecification, share: LinearShare | None) -> list[StoredPart]:
    """What is read of a quantized layer, in the order of its outputs."""
    found = []
    for (name, outputs), format in zip(whole.stored.items(), whole.formats, strict=True):
        size = outputs, whole.inputs
        tensors = {WEIGHT: plain_tensor(*size)} if format is None else format.tensors(*size)
        columns = range(whole.inputs) if share is None else share.inputs
        for rows in [range(outputs)] if share is None else share.outputs[name]:
            read = (
                _cut(tensors, "outputs", outputs, rows),
                _cut(tensors, "inputs", size[1], columns),
            )
            kept = _within(read[0], rows), _within(read[1], columns)
            own = None if format is None else format.of_part(outputs, len(read[0]))
            found.append(StoredPart(name, own, tensors, size, *read, kept))
    return found


def _cut(
    tensors: Mapping[str, StoredTensor], of: Literal["outputs", "inputs"], total: int, part: range
) -> range:
    """The least that holds ``part``, something at least, and ends where all tensors can be cut."""
    axes = [axis for tensor in tensors.values() for axis in tensor.axes if axis.of == of]
    # One entry for all is the entry of any part.
    shared = [axis for axis in axes if axis.numbers >= total and axis.entries == 1]
    step = math.lcm(*(axis.numbers for axis in axes if axis not in shared))
    first = min(part.start, total - 1) // step * step
    return range(first, min(max(-(-part.stop // step) * step, first + step), total))


def _within(read: range, part: range) -> range:
    first = min(part.start - read.start, len(read))
    return range(first, first + len(part))


def share_of(whole: LinearSpecification, own: LinearSpecification, place: RankPlace) -> LinearShare:
    """own: of this rank, the declaration of what it has of ``whole``."""
    names = own.names if len(own.names) > 1 else own.names * len(own.parts)
    begun = dict.fromkeys(own.names, 0)  # rows ahead of the next part
    outputs: dict[str, list[range]] = {name: [] for name in own.names}
    for name, count, of_all in zip(names, own.parts, whole.parts, strict=True):
        first = begun[name] + part_of(of_all, count, place)
        outputs[name].append(range(first, first + count))
        begun[name] += of_all
    column = part_of(whole.inputs, own.inputs, place)
    return LinearShare(whole, outputs, range(column, column + own.inputs))


def head_share(
    whole: LinearSpecification, own: LinearSpecification, place: RankPlace
) -> LinearShare:
    """Of the LM head: the last ranks may have fewer tokens than ``own`` has rows."""
    first = min(place.share * own.outputs, whole.outputs)
    rows = range(first, min(first + own.outputs, whole.outputs))
    return LinearShare(whole, {own.names[0]: [rows]}, range(whole.inputs))


def why_not_divided(whole: LinearSpecification, own: LinearSpecification) -> str:
    """Why a quantized layer cannot be divided so, in words; empty if it can: inputs go by whole
    groups of those that share a scale."""
    if own.inputs == whole.inputs:
        return ""
    for (name, outputs), format in zip(whole.stored.items(), whole.formats, strict=False):
        form = None if format is None else format.form(outputs, whole.inputs)
        if format is None or form is None:
            continue
        if form.ordered:
            return f"{format.title}: inputs of {name} are in groups in any order (desc_act)"
        if form.group and form.group < whole.inputs and own.inputs % form.group:
            return (
                f"{format.title}: {own.inputs} inputs of {name} for each rank are no whole groups "
                f"of {form.group}"
            )
    return ""
