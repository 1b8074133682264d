"""The ranks of an engine as threads of one process, each with its share of a model."""

from __future__ import annotations

import datetime
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from penstock.kernels.cache_kinds import KVCacheKind
from penstock.protocol.model_info import read_model_info
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.protocol.wire.messages.steps import StepPlan, StepResult
from penstock.services.worker.grammar_rows import tokenizer_loader
from penstock.services.worker.loaded_model import LoadedModel
from penstock.services.worker.model_weights import load_model
from penstock.services.worker.models.rank_decoder import RankDecoder
from penstock.services.worker.models.rank_shares import place_of
from penstock.services.worker.rank_executor import RankExecutor
from penstock.services.worker.rank_group import HostRanks, dist

CPU = torch.device("cpu")


class ThreadsMeeting:
    """See ``rank_group.Meeting``."""

    name = "threads"

    def __init__(self) -> None:
        self._store = dist.HashStore()

    def store(self, limit: datetime.timedelta) -> Any:
        return self._store

    def interface(self) -> str:
        return "127.0.0.1"

    def links(self) -> None:
        return None


class Ranks:
    """All ranks of an engine, driven as one executor."""

    def __init__(self, executors: list[RankExecutor], threads: list[ThreadPoolExecutor]) -> None:
        """threads: one of each executor's own, so that none waits for the others."""
        self.executors, self.threads = executors, threads
        self.capacity = executors[0].capacity
        self._under_way: list[Future[StepResult]] = []
        self._launched: deque[StepResult] = deque()

    def execute(self, plan: StepPlan) -> StepResult:
        """Of every rank, each when it is ready; waits for the first, and returns its result."""
        pairs = zip(self.threads, self.executors, strict=True)
        first, *others = [thread.submit(each.execute, plan) for thread, each in pairs]
        for one in self._under_way:
            if one.done():
                one.result()
        self._under_way = [one for one in self._under_way if not one.done()] + others
        for done in as_completed([first, *self._under_way]):
            result = done.result()
            if done is first:
                return result
        raise AssertionError("the first rank has given no result")

    def launch(self, plan: StepPlan) -> None:
        self._launched.append(self.execute(plan))

    def finished(self, wait: bool = False) -> StepResult | None:
        return self._launched.popleft() if self._launched else None


@contextmanager
def ranks_of(
    folder: Path,
    tensor: int,
    pipeline: int,
    sizes: EngineSizes,
    dtype: torch.dtype = torch.float32,
    online: str = "none",
    prepare: Callable[[RankDecoder], object] = lambda model: None,
    kind: KVCacheKind = "auto",
    counts: tuple[int, ...] = (),
) -> Iterator[Ranks]:
    """A model that is divided so. sizes: its groups of layers are filled in; online: as
    ``--quantization`` says; prepare: is given each rank's model before its executor is made;
    kind: of KV memory; counts: layers of each stage."""
    info = read_model_info(folder)
    with ExitStack() as stack:
        threads = [stack.enter_context(ThreadPoolExecutor(1)) for _ in range(tensor * pipeline)]
        executors = []
        for rank in range(tensor * pipeline):
            ranks = HostRanks(place_of(rank, tensor, pipeline, counts), info.vocab_size)
            model = load_model(info, dtype, CPU, lambda note: None, online=online, ranks=ranks)
            assert isinstance(model, RankDecoder)
            prepare(model)
            executor = LoadedModel(model, "a test", kind=kind).executor(sizes)
            assert isinstance(executor, RankExecutor)
            executor.grammars.serve(tokenizer_loader(info))
            executors.append(executor)
        meeting = ThreadsMeeting()
        met = [
            thread.submit(each.meet, meeting)
            for thread, each in zip(threads, executors, strict=True)
        ]
        for one in met:
            one.result()
        yield Ranks(executors, threads)
