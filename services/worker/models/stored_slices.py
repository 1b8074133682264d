"""Which part of each tensor of a checkpoint a rank has: it reads nothing else.

What is divided by outputs has its rows in the file one after another; what is divided by inputs has
a part of every row.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.services.worker.models.linear import Linear
from penstock.services.worker.models.linear_shares import head_share, share_of
from penstock.services.worker.models.linear_specification import LinearSpecification
from penstock.services.worker.models.quantized_linear import QuantizedLinear
from penstock.services.worker.models.rank_shares import RankPlace, part_of
from penstock.services.worker.models.weights import DecoderWeights, named_tensors
from penstock.services.worker.weight_reading import StoredSlice


def own_slices(whole: DecoderWeights, own: DecoderWeights, place: RankPlace) -> list[StoredSlice]:
    """What ``own`` has of the tensors of ``whole``, which is on the meta device and tells shapes
    alone. What no file holds for a rank (rows past the vocabulary, biases that another one adds)
    is made zero. Quantized weights are left out: see ``take_shares``."""
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
        if not target.numel():  # of another stage
            continue
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


def take_shares(whole: DecoderWeights, own: DecoderWeights, place: RankPlace) -> None:
    """Tell quantized layers of ``own`` what they keep of those of ``whole``."""
    for index, layer in enumerate(own.layers, own.first_layer):
        for linear, of_all in zip(layer.linears, whole.layers[index].linears, strict=True):
            if isinstance(linear, QuantizedLinear):
                linear.share = share_of(of_all.specification, linear.specification, place)
    head = own.lm_head
    if isinstance(head, QuantizedLinear):
        head.share = head_share(whole.lm_head.specification, head.specification, place)


def _of_linear(
    linear: Linear, whole: LinearSpecification, prefix: str, place: RankPlace
) -> Iterator[StoredSlice]:
    own, share = linear.specification, share_of(whole, linear.specification, place)
    if own.shard == "inputs":
        name = f"{prefix}{own.names[0]}"
        if not linear.quantized:
            yield StoredSlice(f"{name}.weight", linear.weight, 0, share.inputs.start)
        if linear.bias is not None and place.share:
            linear.bias.zero_()
        elif linear.bias is not None:
            yield StoredSlice(f"{name}.bias", linear.bias)
        return
    parts = [(name, rows.start) for name, found in share.outputs.items() for rows in found]
    for kind, tensor in (("weight", linear.weight), ("bias", linear.bias)):
        if tensor is None or (kind == "weight" and linear.quantized):
            continue
        targets = torch.split(tensor, list(own.parts))
        for (name, row), target in zip(parts, targets, strict=True):
            yield StoredSlice(f"{prefix}{name}.{kind}", target, row)
