"""The steps by which an executor shows at start what it takes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from penstock.protocol.sampling import MAX_LOGPROBS
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.protocol.wire.messages.steps import (
    Chunk,
    NewSlot,
    SlotAdjustments,
    SlotSampling,
    StepPlan,
)
from penstock.services.worker.memory import blocks_for

if TYPE_CHECKING:
    from penstock.services.worker.gpu.executor import GpuExecutor
    from penstock.services.worker.model_executor import ModelExecutor

    AnyExecutor = ModelExecutor | GpuExecutor
    """Both have ``execute``."""

PLAIN = SlotSampling(1.0, 0, 1.0, 0)


def run_once(executor: AnyExecutor, tokens: int) -> float:
    """Prefill one sequence of ``tokens`` tokens and drop it again; returns the seconds."""
    capacity = executor.capacity
    new = NewSlot(0, _ids(capacity, tokens), tokens, 0, _blocks(capacity, tokens), PLAIN.packed())
    begun = time.perf_counter()
    executor.execute(StepPlan(0, 1, True, [], [new], [], [Chunk(0, 0, tokens, True, [])]))
    executor.reset()
    return time.perf_counter() - begun


def run_all_rows(executor: AnyExecutor, tokens: int) -> None:
    """One step of ``tokens`` tokens in as many sequences as may run, which all draw and ask for all
    that the sampler can do; and one sequence whose prompt's logprobs are asked for.

    The sequences share their blocks: what they compute means nothing.
    """
    capacity = executor.capacity
    asked = _asking_for_all(capacity.vocab_size).packed()
    seqs = capacity.max_num_seqs
    length = max(1, tokens // seqs)
    blocks, ids = _blocks(capacity, length), _ids(capacity, length)
    slots = range(seqs)
    added = [NewSlot(slot, ids, length, 0, blocks, asked) for slot in slots]
    chunks = [Chunk(slot, 0, length, True, []) for slot in slots]
    executor.execute(StepPlan(0, 1, True, [], added, [], chunks))
    executor.reset()
    ids, blocks = _ids(capacity, tokens), _blocks(capacity, tokens)
    new = NewSlot(0, ids, tokens, 0, blocks, asked, prompt_logprobs=MAX_LOGPROBS)
    executor.execute(StepPlan(0, 1, True, [], [new], [], [Chunk(0, 0, tokens, True, [])]))
    executor.reset()


def _asking_for_all(vocab: int) -> SlotSampling:
    tokens = np.arange(min(vocab, 64), dtype="<i4").tobytes()
    adjustments = SlotAdjustments(
        repetition=1.1,
        frequency=0.1,
        presence=0.1,
        biased=tokens,
        biases=np.zeros(min(vocab, 64), "<f4").tobytes(),
        allowed=np.arange(vocab, dtype="<i4").tobytes(),
        bad_words=[tokens[:8]],
    )
    return SlotSampling(1.0, 0, 0.9, 0, 0.01, adjustments, MAX_LOGPROBS)


def _ids(capacity: EngineSizes, count: int) -> bytes:
    return (np.arange(count, dtype=np.int64) % capacity.vocab_size).astype("<i4").tobytes()


def _blocks(capacity: EngineSizes, tokens: int) -> list[int]:
    groups = max(1, len(capacity.groups))
    return list(range(groups * blocks_for(tokens, capacity.block_size)))
