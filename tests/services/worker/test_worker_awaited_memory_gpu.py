"""A worker that is prepared while another one computes, on a GPU: graphs over memory to come."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.worker.plan_driver import PlanDriver
from support.worker.tiny_models import some_prompts
from test_worker_gpu_executor import DEVICE, gpu_executor, silent

from penstock.protocol.model_info import read_model_info
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.services.worker.gpu.decoder import dense_executor
from penstock.services.worker.gpu.executor import GpuExecutor
from penstock.services.worker.gpu.held_memory import DeviceMemory
from penstock.services.worker.layer_groups import group_layers
from penstock.services.worker.memory import EXTRA_BLOCKS
from penstock.services.worker.memory_plan import block_bytes
from penstock.services.worker.model_weights import load_model
from penstock.services.worker.models.dense import DenseConfig, dense_config
from penstock.services.worker.models.dense_form import dense_model

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("few_programs")]
Folder = Callable[[str], Path]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graphs_of_a_prepared_worker_compute_in_the_memory_that_it_receives(
    tiny_folder: Folder,
) -> None:
    folder, prompts = tiny_folder("qwen3"), some_prompts([1, 33, 20, 64])
    plain = gpu_executor(folder)
    plain.warm_up()
    expected = PlanDriver(plain, 0).run(prompts, 12, chunk=24)
    info = read_model_info(folder)
    model = load_model(info, torch.float32, DEVICE, silent, longest=256)
    config = dense_config(model.specification)
    assert isinstance(config, DenseConfig), config
    groups = group_layers(model.caches).groups
    sizes = EngineSizes(80, 16, 8, 48, 256, info.vocab_size, groups=groups)
    size = (80 + EXTRA_BLOCKS) * block_bytes(model.caches, 16, 4)
    memory = DeviceMemory()
    theirs = memory.make(size)
    theirs.memory.fill_(1)
    kv = memory.awaited(theirs.descriptor, size)
    dense = dense_model(config, model.specification, model.weights)
    prepared = dense_executor(*dense, sizes, kv_memory=kv.memory)
    prepared.warm_up()
    torch.cuda.synchronize()
    kv.withdraw()
    assert bool((theirs.memory == 1).all()), "the other one's memory is as it was"
    kv.receive()
    assert not bool(theirs.memory.any()), "it is the same memory, as zeros"
    assert isinstance(prepared, GpuExecutor) and not prepared.graphs.why_none
    assert PlanDriver(prepared, 1).run(prompts, 12, chunk=24, preemptions=1) == expected
    assert bool(theirs.memory.any())
    os.close(theirs.descriptor)
