"""Two engines behind one router, of one rank and of two, give what one worker gives, whichever
family the model is of. Layouts of one engine have all families in one process
(tests/services/worker/test_worker_divided_matrix.py)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from support.pipeline.clients import Answer
from support.pipeline.reference_models import write_model
from support.pipeline.served import served
from test_pipeline_divided_engines import FLAGS, answers, check, workers

from penstock.loadtest.models.make_model import make_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

COMMON = (*FLAGS[:6], "--max-num-batched-tokens", "64", "--max-model-len", "136")
BLOCKS = {"gemma2": 36}
"""KV memory of each engine for one of the sequences and a little more: where layers have windows
and where they have none, blocks of their own."""


@pytest.fixture(scope="module")
def of_one(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[Answer]]]:
    """The folder of a family, and what one worker answers."""
    root = tmp_path_factory.mktemp("models")

    @cache
    def answered(family: str) -> tuple[Path, list[Answer]]:
        folder = write_model(family, root / family)
        make_tokenizer(320).save(str(folder / "tokenizer.json"))  # as grammars need it
        with served(str(folder), *COMMON, "--num-kv-blocks", "500") as server:
            return folder, answers(server)

    return answered


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2"])
def test_two_engines_answer_as_one_worker_does(
    family: str, tensor: int, of_one: Callable[[str], tuple[Path, list[Answer]]]
) -> None:
    folder, expected = of_one(family)
    sizes = ("--data-parallel-size", "2", "--tensor-parallel-size", str(tensor))
    memory = ("--block-size", "8", "--num-kv-blocks", str(BLOCKS.get(family, 18)))
    with served(str(folder), *COMMON, *memory, *sizes) as server:
        assert len(workers(server)) == 2 * tensor
        check(answers(server), expected)
        metrics = server.settled()
        assert metrics["penstock_preemptions_total"] > 0
        assert metrics["penstock_prefix_cache_hit_tokens_total"] > 0
