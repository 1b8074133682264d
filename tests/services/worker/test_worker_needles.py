"""A model that looks for what stands behind a token finds it, whatever its KV memory is made of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.worker.plan_driver import PlanDriver

from penstock.kernels.cache_kinds import KVCacheKind
from penstock.loadtest.studies.needle import haystack, write_model
from penstock.protocol.model_info import read_model_info
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.services.worker.layer_groups import group_layers
from penstock.services.worker.model_executor import ModelExecutor
from penstock.services.worker.model_weights import load_model
from penstock.services.worker.plain_attention import REFERENCE

POSITIONS, NEEDLES = 700, 6


@pytest.mark.parametrize("kind", ["auto", "int8", "fp8"])
def test_needles_are_found_from_one_end_to_the_other(kind: KVCacheKind, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", POSITIONS + 16, 30.0)
    info = read_model_info(folder)
    model = load_model(info, torch.float32, torch.device("cpu"), lambda note: None, longest=1024)
    groups = group_layers(model.caches).groups
    sizes = EngineSizes(800, 8, 8, 512, 1024, info.vocab_size, groups=groups)
    driver = PlanDriver(ModelExecutor(model, sizes, REFERENCE, kind), 0)
    hay = haystack(POSITIONS, NEEDLES)
    prompts = [[*hay.tokens, question] for question in hay.questions]
    answers = driver.run(prompts, 1, chunk=300)
    assert [answer[0] for answer in answers] == hay.answers
