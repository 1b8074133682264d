"""Which layers share a block table."""

from __future__ import annotations

import pytest

from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.services.worker.layer_groups import MOST_GROUPS, group_layers
from penstock.services.worker.models.specification import CacheSpecification


def layers(*windows: int) -> list[CacheSpecification]:
    return [CacheSpecification(2, 64, 8, window) for window in windows]


@pytest.mark.parametrize(
    ("windows", "size", "groups"),
    [
        ([512, 0] * 13, 13, [0, 512]),
        ([512] * 32, 32, [512]),
        (([512] * 5 + [0]) * 4 + [512] * 2, 4, [0, *[512] * 6]),
        (([512] * 3 + [0]) * 8, 8, [0, 512, 512, 512]),
    ],
    ids=["Gemma 2 2B", "Mistral 7B", "Gemma 3 1B", "OLMo 3 7B"],
)
def test_groups_have_few_unused_places(windows: list[int], size: int, groups: list[int]) -> None:
    found = group_layers(layers(*windows))
    assert (found.layers, [group.window for group in found.groups]) == (size, groups)
    assert len(set(found.places)) == len(windows)
    for window, (group, place) in zip(windows, found.places, strict=True):
        assert found.groups[group].window == window
        assert place < size


def test_windows_that_save_nothing_are_not_told() -> None:
    for windows in ([0] * 27 + [512], [0, 0]):
        found = group_layers(layers(*windows))
        assert found.groups == []
        assert found.places == [(0, number) for number in range(len(windows))]


def test_layers_of_different_shapes_are_one_group() -> None:
    wide = CacheSpecification(2, 128, 8, 0)
    assert group_layers([*layers(512, 512), wide]).groups == []


def test_no_model_has_more_groups_than_a_scheduler_plans_for() -> None:
    for full in range(40):
        for windowed in range(1, 40):
            found = group_layers(layers(*[0] * full, *[512] * windowed))
            assert len(found.groups) <= MOST_GROUPS


def test_a_long_sequence_holds_its_windows_and_no_more() -> None:
    found = group_layers(layers(*([512] * 5 + [0]) * 8))
    sizes = EngineSizes(10_000, 16, 8, 256, 100_000, 100, groups=found.groups)
    whole = 6250 * len(layers(*([512] * 5 + [0]) * 8))
    assert sizes.sequence_blocks(100_000) * found.layers < 0.2 * whole


def test_more_windows_than_groups_are_one_group() -> None:
    caches = [CacheSpecification(2, 16, 4, 16 * number) for number in range(1, MOST_GROUPS + 2)]
    assert group_layers(caches).groups == []
    assert len(group_layers(caches[:-1]).groups) == MOST_GROUPS
