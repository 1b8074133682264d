"""The ranks of an engine as threads of one process, each with its share of a model."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from penstock.protocol.model_info import read_model_info
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.protocol.wire.messages.steps import StepPlan, StepResult
from penstock.services.worker.grammar_rows import tokenizer_loader
from penstock.services.worker.loaded_model import LoadedModel
from penstock.services.worker.model_weights import load_model
from penstock.services.worker.models.rank_decoder import RankDecoder
from penstock.services.worker.models.rank_shares import place_of
from penstock.services.worker.rank_executor import RankExecutor
from penstock.services.worker.rank_group import HostRanks

CPU = torch.device("cpu")


class ThreadsMeeting:
    """See ``rank_group.Meeting``."""

    name = "threads"

    def __init__(self) -> None:
        self._store = dist.HashStore()

    def store(self, limit: datetime.timedelta) -> dist.Store:
        return self._store

    def interface(self) -> str:
        return "127.0.0.1"


class Ranks:
    """All ranks of an engine, driven as one executor."""

    def __init__(self, executors: list[RankExecutor], threads: ThreadPoolExecutor) -> None:
        self.executors, self._threads = executors, threads
        self.capacity = executors[0].capacity

    def execute(self, plan: StepPlan) -> StepResult:
        """Of every rank; returns the result of the first."""
        results = list(self._threads.map(lambda each: each.execute(plan), self.executors))
        assert all(result.tokens == results[0].tokens for result in results)
        return results[0]


@contextmanager
def ranks_of(
    folder: Path,
    tensor: int,
    pipeline: int,
    sizes: EngineSizes,
    dtype: torch.dtype = torch.float32,
) -> Iterator[Ranks]:
    """A model that is divided so. sizes: its groups of layers are filled in."""
    info = read_model_info(folder)
    with ThreadPoolExecutor(tensor * pipeline) as threads:
        executors = []
        for rank in range(tensor * pipeline):
            ranks = HostRanks(place_of(rank, tensor, pipeline), info.vocab_size)
            model = load_model(info, dtype, CPU, lambda note: None, ranks=ranks)
            assert isinstance(model, RankDecoder)
            executor = LoadedModel(model, "a test").executor(sizes)
            assert isinstance(executor, RankExecutor)
            executor.grammars.serve(tokenizer_loader(info))
            executors.append(executor)
        meeting = ThreadsMeeting()
        list(threads.map(lambda each: each.meet(meeting), executors))
        yield Ranks(executors, threads)
