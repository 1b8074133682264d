"""Every family by every layout of ranks gives what one worker gives: greedy and seeded tokens,
penalties, logprobs and structured outputs, with the prefix cache and under preemption."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from support.worker.plan_driver import GREEDY
from support.worker.ranks_in_threads import ranks_of
from support.worker.scheduled_executor import Outputs, scheduled, work
from support.worker.tiny_models import some_prompts, write_model

from penstock.loadtest.models.make_model import make_tokenizer
from penstock.protocol.grammar.request import Grammar
from penstock.protocol.logprobs import PackedLogprobs
from penstock.protocol.model_info import read_model_info
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.protocol.wire.messages.requests import TokenWork
from penstock.protocol.wire.messages.steps import SlotAdjustments, SlotSampling
from penstock.protocol.wire.messages.tokens import EndReason
from penstock.services.worker.grammar_rows import tokenizer_loader
from penstock.services.worker.layer_groups import group_layers
from penstock.services.worker.model_executor import ModelExecutor
from penstock.services.worker.model_weights import load_model

LAYOUTS = [
    # Tensor, pipeline
    (2, 1),
    (4, 1),  # two KV heads, each on two ranks
    (1, 2),
    (1, 3),  # four layers: 2, 1, 1
    (2, 2),
]
SHOWN = {
    "llama3": LAYOUTS,
    "qwen2": [(4, 1), (2, 2)],  # biases of KV heads that two ranks have
    "qwen3": [(2, 2)],
    "gemma2": [(1, 3), (2, 2)],  # a stage whose layers are all of one kind
}
"""What the quick run shows: every family divided both ways, every layout for one of them."""
END = 306
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
GRAMMAR = Grammar("json_schema", json.dumps({**SCHEMA, "additionalProperties": False}))
SAMPLINGS = [
    GREEDY,
    SlotSampling(0.8, 40, 0.95, 11, 0.02),
    SlotSampling(0.0, 0, 1.0, 0, logprobs=2),
    SlotSampling(
        0.7, 0, 1.0, 5, logprobs=3,
        adjustments=SlotAdjustments(repetition=1.2, frequency=0.3, presence=0.1),
    ),
    SlotSampling(0.9, 0, 1.0, 6, adjustments=SlotAdjustments(grammar=GRAMMAR)),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family, with a tokenizer, as grammars need it."""
    root = tmp_path_factory.mktemp("models")

    @cache
    def written(family: str) -> Path:
        folder = write_model(f"{family}-deep", root / family)
        make_tokenizer(307).save(str(folder / "tokenizer.json"))
        return folder

    return written


@pytest.fixture(scope="module")
def of_one(folder_of: Callable[[str], Path]) -> Callable[[str], tuple[EngineSizes, Outputs]]:
    """The sizes for a family, and what one worker answers."""

    @cache
    def answered(family: str) -> tuple[EngineSizes, Outputs]:
        info = read_model_info(folder_of(family))
        model = load_model(info, torch.float32, torch.device("cpu"), lambda note: None)
        groups = group_layers(model.caches).groups
        sizes = EngineSizes(12 * max(1, len(groups)), 8, 4, 40, 128, info.vocab_size, groups=groups)
        executor = ModelExecutor(model, sizes)
        executor.grammars.serve(tokenizer_loader(info))
        return sizes, answers(executor)

    return answered


def works() -> list[TokenWork]:
    """Prompts that begin alike; they come one after another, since there are fewer slots."""
    (common,) = some_prompts([40])
    return [
        work(
            [*common[: 24 + 4 * number], number, number + 1],
            sampling,
            16,
            stop_ids=[END] if sampling is SAMPLINGS[4] else None,
            prompt_logprobs=1 if number == 0 else None,
        )
        for number, sampling in enumerate([*SAMPLINGS, SAMPLINGS[1]])
    ]


def answers(executor: Any) -> Outputs:
    outputs, counted = scheduled(executor, works())
    assert set(outputs.ends.values()) <= {EndReason.LENGTH, EndReason.STOP}, outputs.ends
    assert counted.preemptions > 0
    assert counted.prefix_hit_tokens > 0
    return outputs


def check_alike(ours: dict[Any, PackedLogprobs], theirs: dict[Any, PackedLogprobs]) -> None:
    assert ours.keys() == theirs.keys() and ours
    for key, one in ours.items():
        first, second = (np.frombuffer(each.entries, "<f4") for each in (one, theirs[key]))
        np.testing.assert_allclose(first, second, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "tensor", "pipeline"),
    [
        pytest.param(family, *layout, marks=[] if layout in SHOWN[family] else pytest.mark.slow)
        for family in SHOWN
        for layout in LAYOUTS
    ],
)
def test_every_layout_gives_what_one_worker_gives(
    family: str,
    tensor: int,
    pipeline: int,
    folder_of: Callable[[str], Path],
    of_one: Callable[[str], tuple[EngineSizes, Outputs]],
) -> None:
    sizes, expected = of_one(family)
    sizes = replace(sizes, micro_batches=pipeline)
    with ranks_of(folder_of(family), tensor, pipeline, sizes) as ranks:
        got = answers(ranks)
    assert (got.tokens, got.ends) == (expected.tokens, expected.ends)
    check_alike(got.logprobs, expected.logprobs)
    check_alike(got.prompt_logprobs, expected.prompt_logprobs)
    text = make_tokenizer(307).decode(got.tokens[4][:-1])
    assert got.ends[4] is not EndReason.STOP or json.loads(text)["a"] in (1, 2)


@pytest.mark.parametrize(
    ("family", "counts"),
    [
        ("gemma2", (3, 1)),
        ("gemma2", (1, 1, 2)),
        ("llama3", (1, 3)),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (("gemma2", (1, 3)), ("llama3", (3, 1)), ("llama3", (1, 1, 2)))
        ),
    ],
)
def test_whatever_layers_the_stages_have_the_tokens_are_those_of_one_worker(
    family: str,
    counts: tuple[int, ...],
    folder_of: Callable[[str], Path],
    of_one: Callable[[str], tuple[EngineSizes, Outputs]],
) -> None:
    sizes, expected = of_one(family)
    sizes = replace(sizes, micro_batches=len(counts))
    with ranks_of(folder_of(family), 1, len(counts), sizes, counts=counts) as ranks:
        got = answers(ranks)
    assert (got.tokens, got.ends) == (expected.tokens, expected.ends)
