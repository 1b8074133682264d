"""Which layers the stages of a pipeline have: by costs, within memory, alike on all ranks."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import combinations, pairwise
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from support.worker.ranks_in_threads import ThreadsMeeting

from penstock.protocol.config import ClusterConfig, Config, ConfigError, DeviceConfig, ModelConfig
from penstock.protocol.model_info import read_model_info
from penstock.services.worker.models.rank_shares import place_of
from penstock.services.worker.models.stage_division import StageRoom, divided, even
from penstock.services.worker.rank_choice import (
    check_division,
    rank_place,
    stage_layers,
    words_of_stage,
)
from penstock.services.worker.rank_group import all_there


def every(count: int, stages: int) -> list[tuple[int, ...]]:
    bounds = [(0, *inner, count) for inner in combinations(range(1, count), stages - 1)]
    return [tuple(b - a for a, b in pairwise(one)) for one in bounds]


def costs_of_stages(counts: Sequence[int], costs: Sequence[int], last: int) -> list[int]:
    found, begin = list[int](), 0
    for count in counts:
        found.append(sum(costs[begin : begin + count]))
        begin += count
    found[-1] += last
    return found


def test_of_all_divisions_it_is_the_one_whose_dearest_stage_costs_the_least() -> None:
    chance = random.Random(3)
    for _ in range(60):
        count = chance.randint(1, 8)
        stages = chance.randint(1, count)
        costs = [chance.randint(1, 6) for _ in range(count)]
        last, first = chance.randint(0, 9), chance.randint(0, 4)
        held = [chance.randint(1, 6) for _ in range(count)]
        room = StageRoom(held, chance.randint(0, 3), chance.randint(0, 3), chance.randint(4, 25))

        def fits(counts: tuple[int, ...], held: list[int] = held, room: StageRoom = room) -> bool:
            stages = costs_of_stages(counts, held, room.last)
            stages[0] += room.first
            return max(stages) <= room.device

        def rank(
            counts: tuple[int, ...], costs: list[int] = costs, ends: tuple[int, int] = (first, last)
        ) -> tuple[int, int]:
            found = costs_of_stages(counts, costs, ends[1])
            found[0] += ends[0]
            return max(found), sum(each * each for each in found)

        divisions = every(count, stages)
        assert rank(divided(costs, stages, last, first=first)) == min(map(rank, divisions))
        if fitting := [one for one in divisions if fits(one)]:
            found = divided(costs, stages, last, room, first=first)
            assert fits(found) and rank(found) == min(map(rank, fitting))
        else:
            with pytest.raises(ValueError, match="do not fit"):
                divided(costs, stages, last, room, first=first)


def test_equal_layers_are_divided_evenly_with_more_in_the_first_stages() -> None:
    for count, stages in [(4, 2), (4, 3), (7, 3), (32, 5), (5, 5), (9, 1)]:
        assert divided([1] * count, stages) == even(count, stages)


def test_dear_layers_and_a_heavy_head_leave_their_stage_fewer() -> None:
    assert divided([1, 1, 1, 1, 3, 3], 2) == (4, 2)
    assert divided([1] * 8, 2, 2.0) == (5, 3)
    assert divided([1] * 8, 2, 100.0) == (7, 1), "no stage is without a layer"


def test_memory_moves_a_boundary() -> None:
    room = StageRoom([2] * 8, 4, 2, 12)
    assert divided([1] * 8, 2, 2.0) == (5, 3)
    assert divided([1] * 8, 2, 2.0, room) == (4, 4), "beside the embedding there is room for four"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Settings of a Llama with four layers and an LM head that is as large as 3.8 of them."""
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 2000,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
    }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    return tmp_path


def config_for(folder: Path, *, device: str = "cpu", **cluster: object) -> Config:
    return Config(
        model=ModelConfig(model=str(folder)),
        device=msgspec.convert({"device": device}, DeviceConfig),
        cluster=msgspec.convert(cluster, ClusterConfig),
    )


def test_all_ranks_find_the_same_layers_and_have_each_once(folder: Path) -> None:
    info = read_model_info(folder)
    for settings, counts in [
        ({"pipeline_layers": "1,3"}, (1, 3)),
        ({"pipeline_layers": "even"}, (2, 2)),
        ({"device": "cuda"}, (2, 2)),
        ({}, (3, 1)),  # the LM head is as much as 3.8 layers
    ]:
        config = config_for(folder, pipeline_parallel_size=2, **settings)  # type: ignore[arg-type]
        check_division(config, info)
        places = [
            rank_place(replace(config, cluster=replace(config.cluster, rank=rank)), info)
            for rank in (1, 0)
        ]
        assert {one.counts for one in places} == {counts} == {stage_layers(config, info).counts}
        assert [n for one in places for n in one.layers(4)] == [0, 1, 2, 3]


def test_the_line_at_the_start_names_the_layers_and_the_reason(folder: Path) -> None:
    config = config_for(folder, pipeline_parallel_size=2)
    words = words_of_stage(config, read_model_info(folder))
    assert words.startswith("; layers 3 to 3, stage 2 of 2 with 3, 1 layers (balanced: a decode")
    assert not words_of_stage(config_for(folder), read_model_info(folder))


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ("2,1", "--pipeline-layers 2,1: together 3 layers, and the model has 4"),
        ("2,1,1", "--pipeline-layers 2,1,1 lists 3 stages, and --pipeline-parallel-size is 2"),
        ("4,0", "--pipeline-layers 4,0: each stage has one layer at least"),
    ],
)
def test_wrong_sums_are_refused_with_the_numbers(layers: str, words: str, folder: Path) -> None:
    config = config_for(folder, pipeline_parallel_size=2, pipeline_layers=layers)
    with pytest.raises(ConfigError, match=words):
        check_division(config, read_model_info(folder))


def test_ranks_that_divide_otherwise_do_not_meet() -> None:
    meeting = ThreadsMeeting()
    meeting.store(None).set("threads/1", "(3, 1)")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"rank 1 has stages of \(3, 1\) .* rank 0 of \(2, 2\)"):
        all_there(meeting, place_of(0, 1, 2, (2, 2)))
