"""Which layers share a block table, so that layers with a window or chunks keep nothing else.

All groups draw on one pool of blocks, so a block has the same bytes in each: every group has as
many layers, or fewer. Of a model with 4 full layers and 22 with a window, say, a block holds 4
layers; one group has the full ones, six have the others. Source of the idea: vLLM's hybrid KV cache
manager.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.protocol.wire.messages.engine import LayerGroup
from penstock.services.worker.models.specification import CacheSpecification

_FULL = LayerGroup()
MOST_GROUPS = 8
"""As many as a scheduler plans for."""
_FULL_WEIGHT = 4
"""An unused place in blocks of full layers counts as so many in blocks of layers with a window: the
former are as many as a sequence has positions, the latter as many as its window. With sequences of
four windows or more it is at least so."""


class LayerGroups(NamedTuple):
    groups: list[LayerGroup]
    """What the scheduler is told; nothing: one group of full attention."""
    layers: int
    """Layers of a block."""
    places: list[tuple[int, int]]
    """For each layer of the model its group, and its place in the group's blocks."""


def group_layers(caches: Sequence[CacheSpecification]) -> LayerGroups:
    """caches: what each layer keeps. Layers of different shapes, or with more windows than a
    scheduler has groups, are one group: then windows give nothing back."""
    shapes = {(cache.num_kv_heads, cache.head_dim) for cache in caches}
    kinds = sorted({cache.group for cache in caches}, key=lambda kind: (kind.window, kind.kind))
    if len(shapes) > 1 or kinds == [_FULL] or len(kinds) > MOST_GROUPS:
        return LayerGroups([], len(caches), [(0, number) for number in range(len(caches))])
    of_kind = {
        kind: [at for at, cache in enumerate(caches) if cache.group == kind] for kind in kinds
    }
    size = _layers_of_a_block([len(layers) for layers in of_kind.values()], _FULL in kinds)
    full = len(of_kind.get(_FULL, []))
    if -(-full // size) * size >= len(caches):  # unused places cost as much as windows save
        return LayerGroups([], len(caches), [(0, number) for number in range(len(caches))])
    groups: list[LayerGroup] = []
    places: dict[int, tuple[int, int]] = {}
    for kind, layers in of_kind.items():
        for first in range(0, len(layers), size):
            for place, layer in enumerate(layers[first : first + size]):
                places[layer] = len(groups), place
            groups.append(kind)
    return LayerGroups(groups, size, [places[layer] for layer in range(len(caches))])


def of_layers(grouped: LayerGroups, chosen: range) -> LayerGroups:
    """The same groups with some of the model's layers alone, for one that has no others: a block
    holds as many layers as it has of the group that it has most of."""
    counts = [0] * max(1, len(grouped.groups))
    places = []
    for group, _ in grouped.places[chosen.start : chosen.stop]:
        places.append((group, counts[group]))
        counts[group] += 1
    return LayerGroups(grouped.groups, max(counts), places)


def _layers_of_a_block(counts: list[int], full: bool) -> int:
    """The size with the least waste of those that give few enough groups; counts: layers of each
    kind, those of full attention first if there are any."""

    def waste(size: int) -> int:
        unused = [-count % size for count in counts]
        return sum(unused) + (_FULL_WEIGHT - 1) * unused[0] * full

    sizes = [
        size
        for size in range(1, max(counts) + 1)
        if sum(-(-count // size) for count in counts) <= MOST_GROUPS
    ]
    return min(sizes, key=lambda size: (waste(size), -size))


def block_shapes(
    caches: Sequence[CacheSpecification], grouped: LayerGroups
) -> list[tuple[int, int]]:
    """KV heads and head size of each layer that a block holds."""
    shapes = [(cache.num_kv_heads, cache.head_dim) for cache in caches]
    if grouped.groups:  # their layers are of one shape
        shapes = list(dict.fromkeys(shapes)) * grouped.layers
    return shapes
