"""An executor of a loaded model: its KV memory, and the first steps, which find what is fastest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.protocol.config import ConfigError
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.services.worker.cpu_threads import (
    StepThreads,
    ThreadReview,
    ThreadTrial,
    agreeing,
    candidates,
    trial_capacity,
)
from penstock.services.worker.executor import PLAIN_KERNELS
from penstock.services.worker.loaded_model import LoadedModel, words_of_others
from penstock.services.worker.model_executor import ModelExecutor
from penstock.services.worker.model_weights import Progress
from penstock.services.worker.models.causal_model import CausalModel
from penstock.services.worker.models.decoder import Decoder
from penstock.services.worker.models.rank_decoder import RankDecoder
from penstock.services.worker.step_profile import run_once

if TYPE_CHECKING:
    from penstock.services.worker.ahead_compilation import AheadCompilation
    from penstock.services.worker.step_profile import AnyExecutor


def executor_of(subject: LoadedModel, capacity: EngineSizes, progress: Progress) -> AnyExecutor:
    """Takes KV memory. Raises ``ConfigError`` where the system does not give it."""
    progress(f"taking KV memory for {capacity.num_blocks} blocks")
    try:
        return subject.executor(capacity)
    except MemoryError as failure:
        raise ConfigError(
            f"KV memory for {capacity.num_blocks} blocks: {failure}; lower --num-kv-blocks or "
            "--kv-cache-memory-bytes, or let the system promise more (vm.overcommit_memory)"
        ) from failure


def run_first(
    executor: AnyExecutor,
    subject: LoadedModel,
    threads: int | None,
    cores: int,
    progress: Progress,
    ahead: AheadCompilation | None,
) -> None:
    """The first steps: on a CPU they find the number of threads (unless ``threads`` gives it), on a
    GPU they compile kernels and capture graphs. The executor's summary says what came of it."""
    model = subject.model
    if isinstance(executor, ModelExecutor) and model.device.type == "cpu":
        progress("measuring how many threads are fastest")
        found = set_threads(executor, model, threads, cores)
        by_others = "" if isinstance(model, Decoder) else f"{words_of_others(model)}; "
        executor.summary = by_others + found
        return
    if isinstance(executor, ModelExecutor):
        executor.summary = f"{PLAIN_KERNELS}: {subject.kernels}; {subject.attention.summary}"
        run_once(executor, 1)
        return
    progress("compiling kernels and capturing graphs")
    run_once(executor, 1)
    executor.warm_up()
    if ahead is not None:
        ahead.complete()
        executor.summary += f"; {ahead.summary}" if ahead.summary else ""


def set_threads(executor: ModelExecutor, model: CausalModel, given: int | None, cores: int) -> str:
    """Compute with as many threads as ``given``, or as are fastest; returns the reason."""
    if given is None:
        trial = type(executor)(model, trial_capacity(executor.capacity), kind=executor.kind)
        counts = candidates(cores)
        if model.dtype == torch.float32:
            counts = agreeing(trial, counts)
        threads = ThreadTrial(trial, counts)
        choice = threads.start()
        executor.threads = choice.threads
        if len(counts) > 1 and not isinstance(model, RankDecoder):  # which the others wait for
            executor.review = ThreadReview(threads)
        run_once(executor, 1)
        return str(choice)
    executor.threads = StepThreads(given, given)
    run_once(executor, 1)
    return f"{given} thread{'s' if given > 1 else ''}, as --threads says"
