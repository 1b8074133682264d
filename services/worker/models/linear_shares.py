"""Which outputs and inputs of a linear layer a rank has. Needs no torch."""

from __future__ import annotations

from typing import NamedTuple

from penstock.services.worker.models.linear_specification import LinearSpecification
from penstock.services.worker.models.rank_shares import RankPlace, part_of


class LinearShare(NamedTuple):
    """A rank's part of a layer, in the numbers of the whole one."""

    whole: LinearSpecification
    outputs: dict[str, list[range]]
    """By names in a checkpoint, whose rows they count; several of a name that has parts."""
    inputs: range


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
        if form.group and own.inputs % form.group:
            return (
                f"{format.title}: {own.inputs} inputs of {name} for each rank are no whole groups "
                f"of {form.group}"
            )
    return ""
