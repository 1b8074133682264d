"""The ranks of an engine as processes that share one CUDA device: a setting of tests alone.

Servers give each rank a device of its own. NCCL refuses two ranks on one device of a host, so each
process is told another name of the host (``NCCL_HOSTID``), and what they send goes over sockets.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from penstock.protocol.model_info import read_model_info
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.protocol.wire.messages.steps import StepPlan, StepResult
from penstock.services.worker.gpu.device_ranks import DeviceRanks
from penstock.services.worker.gpu.rank_decoder import RankGpuExecutor
from penstock.services.worker.gpu.rank_executor import rank_executor
from penstock.services.worker.model_weights import load_model
from penstock.services.worker.models.dense import DenseConfig, dense_config
from penstock.services.worker.models.dense_form import dense_model
from penstock.services.worker.models.rank_decoder import RankDecoder
from penstock.services.worker.models.rank_shares import place_of
from penstock.services.worker.rendezvous import LOOPBACK, EpochMeeting, Rendezvous

GUARD_SECONDS = 60


class RankProcesses:
    """All ranks of an engine, driven as one executor."""

    def __init__(self, pipes: list[Connection]) -> None:
        """pipes: to each rank's process, the first one's first."""
        self._pipes = pipes
        self.capacity: EngineSizes
        rendezvous, self.capacity = self._answer(0)
        for rank in range(1, len(pipes)):
            self._answer(rank)
        self._tell(rendezvous)
        said = [self._answer(rank) for rank in range(len(pipes))]
        self.by_peer_memory = [each for each, _ in said]
        """Of each rank: whether sums of few rows go over peer memory."""
        self.why_no_graphs = [each for _, each in said]
        """Of each rank; empty: its steps are captured in CUDA graphs."""

    def execute(self, plan: StepPlan) -> StepResult:
        self._tell(plan)
        results: list[StepResult] = [self._answer(rank) for rank in range(len(self._pipes))]
        return results[0]

    def _tell(self, what: Any) -> None:
        for pipe in self._pipes:
            pipe.send(what)

    def _answer(self, rank: int) -> Any:
        if not self._pipes[rank].poll(GUARD_SECONDS):
            others = [pipe.recv() for pipe in self._pipes if pipe.poll()]
            raise AssertionError(f"rank {rank} does not answer; the others say {others}")
        found = self._pipes[rank].recv()
        assert not isinstance(found, str), f"rank {rank}: {found}"
        return found


@contextmanager
def rank_processes(
    folder: Path, tensor: int, pipeline: int, sizes: EngineSizes, one_shot: bool
) -> Iterator[RankProcesses]:
    """The model of ``folder``, divided so, all on CUDA device 0. sizes: their groups are filled
    in; one_shot: whether sums of few rows may go over peer memory."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        for rank in range(tensor * pipeline):
            pipe, far = context.Pipe()
            process = context.Process(
                target=_rank, args=(far, folder, rank, tensor, pipeline, sizes, one_shot)
            )
            process.start()
            far.close()
            pipes.append(pipe)
            processes.append(process)
        yield RankProcesses(pipes)
    finally:
        for process in processes:
            process.kill()
            process.join(GUARD_SECONDS)


def _rank(
    pipe: Connection,
    folder: Path,
    rank: int,
    tensor: int,
    pipeline: int,
    sizes: EngineSizes,
    one_shot: bool,
) -> None:
    os.environ |= {
        "NCCL_HOSTID": f"rank {rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
    }  # fmt: skip
    try:
        place = place_of(rank, tensor, pipeline)
        ranks = DeviceRanks(place, sizes.vocab_size, one_shot)
        executor = _executor(folder, sizes, ranks)
        executor.warm_up()
        rendezvous = Rendezvous(LOOPBACK, rank=rank, size=place.size, on_gpus=True)
        pipe.send((rendezvous.address, executor.capacity))
        executor.meet(EpochMeeting("one device", rendezvous, pipe.recv()))
        row = executor.decoder.space.residual[:1]
        pipe.send((ranks.shared_rows(row) is not None, executor.graphs.why_none))
        while True:
            pipe.send(executor.execute(pipe.recv()))
    except BaseException as failure:
        pipe.send(f"{type(failure).__name__}: {failure}")
        raise


def _executor(folder: Path, sizes: EngineSizes, ranks: DeviceRanks) -> RankGpuExecutor:
    info, device = read_model_info(folder), torch.device("cuda", 0)
    model = load_model(info, torch.float32, device, lambda note: None, longest=256, ranks=ranks)
    assert isinstance(model, RankDecoder)
    form = dense_config(model.specification)
    assert isinstance(form, DenseConfig), form
    sizes = replace(sizes, groups=model.grouped.groups)
    whole = model.own_vocabulary(form)
    config, weights = dense_model(whole, model.specification, model.weights)
    return rank_executor(config, weights, sizes, ranks, model.grouped)
