"""Which part of each tensor of a checkpoint a rank has: it reads nothing else.

What is divided by outputs has its rows in the file one after another; what is divided by inputs has
a part of every row.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.services.worker.models.linear import Linear
from penstock.services.worker.models.linear_specification import LinearSpecification
from penstock.services.worker.models.rank_shares import RankPlace, part_of
from penstock.services.worker.models.weights import DecoderWeights, named_tensors
from penstock.services.worker.weight_reading import StoredSlice


def own_slices(whole: DecoderWeights, own: DecoderWeights, place: RankPlace) -> list[StoredSlice]:
    """What ``own`` has of the tensors of ``whole``, which is on the meta device and tells shapes
    alone. What no file holds for a rank (rows past the vocabulary, biases that another one adds)
    is made zero; quantized weights, which are not divided, are left out."""
    names = own.names
    found: list[StoredSlice] = []
    vocabulary = {f"{names.embedding}.weight", f"{names.lm_head}.weight"}
    stored = named_tensors(whole)
    linears = set[str]()
    for index, layer in enumerate(own.layers, own.first_layer):
        prefix = names.layer.format(index)
        for linear, of_all in zip(layer.linears, whole.layers[index].linears, strict=True):
            linears |= {prefix + name for name in linear.named()}
            found += _of_linear(linear, of_all.specification, prefix, place)
    for name, target in named_tensors(own).items():
        if name in vocabulary:
            found += _of_vocabulary(name, target, len(stored[name]), place)
        elif name not in linears:  # norms, and what has a row for each head
            found.append(StoredSlice(name, target, part_of(len(stored[name]), len(target), place)))
    return found


def _of_vocabulary(name: str, target: Tensor, rows: int, place: RankPlace) -> Iterator[StoredSlice]:
    first = min(place.share * len(target), rows)
    there = min(len(target), rows - first)
    target[there:].zero_()
    yield StoredSlice(name, target[:there], first)


def _of_linear(
    linear: Linear, whole: LinearSpecification, prefix: str, place: RankPlace
) -> Iterator[StoredSlice]:
    own = linear.specification
    if own.shard == "inputs":
        column = part_of(whole.inputs, own.inputs, place)
        if not linear.quantized:
            yield StoredSlice(f"{prefix}{own.names[0]}.weight", linear.weight, 0, column)
        if linear.bias is not None and place.share:
            linear.bias.zero_()
        elif linear.bias is not None:
            yield StoredSlice(f"{prefix}{own.names[0]}.bias", linear.bias)
        return
    names = own.names if len(own.names) > 1 else own.names * len(own.parts)
    for kind, tensor in (("weight", linear.weight), ("bias", linear.bias)):
        if tensor is None or (kind == "weight" and linear.quantized):
            continue
        begun = dict.fromkeys(own.names, 0)  # rows ahead of the next part
        targets = torch.split(tensor, list(own.parts))
        for name, target, of_all in zip(names, targets, whole.parts, strict=True):
            row = begun[name] + part_of(of_all, len(target), place)
            begun[name] += of_all
            yield StoredSlice(f"{prefix}{name}.{kind}", target, row)
