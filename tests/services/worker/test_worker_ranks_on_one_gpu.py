"""Ranks of an engine as two processes that share one GPU, and NCCL in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.worker.plan_driver import GREEDY, PlanDriver
from support.worker.ranks_in_processes import rank_processes
from support.worker.shared_draws import LIMITED, WRITTEN
from support.worker.tiny_models import some_prompts

from penstock.protocol.model_info import read_model_info
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.protocol.wire.messages.steps import SlotSampling
from penstock.services.worker.gpu.decoder import dense_executor
from penstock.services.worker.gpu.nccl import Communicator
from penstock.services.worker.model_weights import load_model
from penstock.services.worker.models.dense import DenseConfig, dense_config
from penstock.services.worker.models.dense_form import dense_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SEEDED = SlotSampling(0.8, 20, 0.9, 7)
TOKENS = 12


@pytest.mark.parametrize(
    ("tensor", "pipeline", "one_shot"),
    [
        pytest.param(2, 1, True, id="tp2-peer-memory"),
        pytest.param(2, 1, False, id="tp2-nccl"),
        pytest.param(1, 2, True, id="pp2"),
    ],
)
def test_two_ranks_on_one_gpu_give_the_tokens_of_one_worker(
    tensor: int, pipeline: int, one_shot: bool, tiny_folder: Callable[[str], Path]
) -> None:
    folder = tiny_folder("qwen3")
    info = read_model_info(folder)
    sizes = EngineSizes(80, 16, 8, 48, 256, info.vocab_size)
    model = load_model(info, torch.float32, torch.device("cuda"), lambda note: None, longest=256)
    form = dense_config(model.specification)
    assert isinstance(form, DenseConfig), form
    alone = dense_executor(*dense_model(form, model.specification, model.weights), sizes)
    prompts = some_prompts([1, 33, 20, 64, 5, 17])
    samplings = [GREEDY, SEEDED] * 3
    wanted = PlanDriver(alone, 0).run(prompts, TOKENS, samplings=samplings)
    sizes = EngineSizes(80, 16, 8, 48, 256, info.vocab_size, micro_batches=pipeline)
    with rank_processes(folder, tensor, pipeline, sizes, one_shot) as ranks:
        executor: Any = ranks
        got = PlanDriver(executor, 1).run(prompts, TOKENS, samplings=samplings, preemptions=1)
        assert got == wanted
        assert ranks.by_peer_memory == [tensor > 1 and one_shot] * 2
        assert ranks.why_no_graphs == ["", ""]


@pytest.mark.parametrize("samplings", [LIMITED, WRITTEN], ids=["limits", "written"])
def test_two_ranks_on_one_gpu_draw_what_rows_ask_for(
    samplings: list[SlotSampling], tiny_folder: Callable[[str], Path]
) -> None:
    folder = tiny_folder("qwen3")
    samplings = [one for one in samplings if one.adjustments is None or not one.adjustments.grammar]
    prompts = some_prompts([5, 33, 2, 47, 3, 16, 14, 8][: len(samplings)])
    info = read_model_info(folder)
    sizes = EngineSizes(80, 16, 8, 48, 256, info.vocab_size)
    model = load_model(info, torch.float32, torch.device("cuda"), lambda note: None, longest=256)
    form = dense_config(model.specification)
    assert isinstance(form, DenseConfig), form
    alone = dense_executor(*dense_model(form, model.specification, model.weights), sizes)
    wanted = PlanDriver(alone, 0).run(prompts, TOKENS, samplings=samplings)
    with rank_processes(folder, 2, 1, sizes, one_shot=True) as ranks:
        executor: Any = ranks
        got = PlanDriver(executor, 1).run(prompts, TOKENS, samplings=samplings, preemptions=1)
    assert got == wanted


def test_a_graph_replays_the_collectives_of_nccl() -> None:
    """Of a group of one rank, all that NCCL takes on one GPU of a host."""
    told: list[bytes] = []

    def share(unique: bytes | None) -> bytes:
        assert unique is not None
        told.append(unique)
        return unique

    group = Communicator(0, 1, share)
    x = torch.arange(12, dtype=torch.float32, device="cuda").view(3, 4)
    doubled, parts = torch.empty_like(x), x.new_empty(1, 3, 4)

    def work() -> None:
        torch.mul(x, 2, out=doubled)
        group.sum(doubled)
        group.gather(doubled, parts)
        group.broadcast(parts)

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        work()  # NCCL connects at the first call of each kind
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        work()
    for step in range(3):
        x.add_(1)
        parts.zero_()
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(parts[0], 2 * x), step
    assert len(told) == 1
    group.abort()
