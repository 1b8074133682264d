"""Memory of a GPU that comes later than the graphs that use it."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.worker.plan_driver import PlanDriver
from support.worker.tiny_models import some_prompts
from test_worker_gpu_executor import DEVICE, gpu_executor, silent

from penstock.protocol.model_info import read_model_info
from penstock.protocol.wire.descriptors import close_all
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.services.worker.gpu.decoder import dense_executor
from penstock.services.worker.gpu.executor import GpuExecutor
from penstock.services.worker.gpu.held_memory import DeviceMemory
from penstock.services.worker.held.description import Describer
from penstock.services.worker.held.memory import move
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graphs_compute_with_weights_that_have_left_the_device_and_come_back(
    tiny_folder: Folder,
) -> None:
    info, prompts = read_model_info(tiny_folder("qwen3")), some_prompts([1, 33, 20, 64])
    model = load_model(info, torch.float32, DEVICE, silent, longest=256)
    config = dense_config(model.specification)
    assert isinstance(config, DenseConfig), config
    dense, memory = dense_model(config, model.specification, model.weights), DeviceMemory()
    describer = Describer()
    describer.model(model, dense, "")
    _, pieces, _ = move(memory, describer.tensors)
    sizes = EngineSizes(
        80, 16, 8, 48, 256, info.vocab_size, groups=group_layers(model.caches).groups
    )
    kv = memory.make((80 + EXTRA_BLOCKS) * block_bytes(model.caches, 16, 4))
    executor = dense_executor(*dense, sizes, kv_memory=kv.memory)
    executor.warm_up()
    expected = PlanDriver(executor, 0).run(prompts, 12, chunk=24)
    assert isinstance(executor, GpuExecutor) and not executor.graphs.why_none
    descriptors = [*(piece.descriptor for piece in pieces), kv.descriptor]
    resting = memory.resting(pieces, kv)
    for number in (1, 2):
        executor.reset()
        free = torch.cuda.mem_get_info()[0]
        in_a_thread(resting.leave)
        close_all(descriptors)
        assert torch.cuda.mem_get_info()[0] >= free + len(kv.memory), "it is the device's again"
        in_a_thread(lambda: descriptors.__setitem__(slice(None), resting.come_back()))
        assert not bool(kv.memory.any())
        assert PlanDriver(executor, number).run(prompts, 12, chunk=24) == expected
    close_all(descriptors)


def in_a_thread(run: Callable[[], object]) -> None:
    """As a worker does it: in one that has never used the device."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(run).result(60)
