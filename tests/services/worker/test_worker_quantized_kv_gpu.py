"""The GPU's executor over keys and values of a byte a number, against the plain one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.worker.plan_driver import PlanDriver
from support.worker.tiny_models import some_prompts
from test_worker_gpu_executor import DEVICE, ON_GPU, silent

from penstock.kernels.cache_kinds import KVCacheKind
from penstock.protocol.model_info import read_model_info
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.services.worker.gpu.decoder import dense_executor
from penstock.services.worker.gpu.model_decoder import model_executor
from penstock.services.worker.layer_groups import group_layers
from penstock.services.worker.memory import EXTRA_BLOCKS
from penstock.services.worker.memory_plan import block_bytes
from penstock.services.worker.model_executor import ModelExecutor
from penstock.services.worker.model_weights import load_model
from penstock.services.worker.models.dense import DenseConfig, dense_config
from penstock.services.worker.models.dense_form import dense_model
from penstock.services.worker.plain_attention import REFERENCE

pytestmark = pytest.mark.usefixtures("few_programs")
KINDS: list[KVCacheKind] = ["int8", "fp8"] if ON_GPU else ["int8"]
"""The interpreter truncates to e4m3."""
TOKENS = 8 if ON_GPU else 2
Folder = Callable[[str], Path]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("variant", "alone"),
    [("qwen3", False), pytest.param("qwen3", True, marks=[] if ON_GPU else pytest.mark.slow)],
)
def test_tokens_are_those_of_the_plain_executor(
    variant: str, alone: bool, kind: KVCacheKind, tiny_folder: Folder
) -> None:
    """alone: kernels compute attention and nothing else of the layers."""
    info = read_model_info(tiny_folder(variant))
    model = load_model(info, torch.float32, DEVICE, silent, longest=256)
    config = dense_config(model.specification)
    assert isinstance(config, DenseConfig), config
    sizes = EngineSizes(
        80, 16, 8, 48, 256, info.vocab_size, groups=group_layers(model.caches).groups
    )
    plain_model = load_model(info, torch.float32, torch.device("cpu"), silent, longest=256)
    prompts = some_prompts([1, 33, 20, 64] if ON_GPU else [20, 33])
    plain = ModelExecutor(plain_model, sizes, REFERENCE, kind)
    expected = PlanDriver(plain, 0).run(prompts, TOKENS, chunk=24)
    if alone:
        executor = model_executor(model, "a test", sizes, kind)
    else:
        dense = dense_model(config, model.specification, model.weights)
        executor = dense_executor(*dense, sizes, None, kind)
    assert PlanDriver(executor, 1).run(prompts, TOKENS, chunk=24, preemptions=1) == expected
    assert not executor.decoder.shares_prefixes, "rows read what they share each for itself"
    pool = executor.decoder.attention.pool.blocks
    held = (80 + EXTRA_BLOCKS) * block_bytes(plain_model.caches, 16, 4, kind=kind)
    assert pool.nbytes == held
