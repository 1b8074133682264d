"""What a worker logs of its executor."""

from __future__ import annotations

import msgspec

from penstock.protocol.process.plain_structlog import Logger
from penstock.protocol.wire.messages.membership import Capacity
from penstock.protocol.wire.messages.steps import Attached
from penstock.services.worker.executor import PLAIN_KERNELS, Executor
from penstock.services.worker.memory_account import table


def say_loaded(executor: Executor, log: Logger) -> None:
    """What it computes with, its use of memory, and what it does besides generating."""
    if executor.summary:
        say_summary(executor, log)
    say_account(executor, log)
    if not executor.generates or executor.tasks:
        log.info(executor.described)


def say_summary(executor: Executor, log: Logger) -> None:
    """What was chosen matters to few; that it is slower than the device could be, to all."""
    slow = executor.summary.startswith(PLAIN_KERNELS)
    say = log.warning if slow else log.debug
    say("executor", summary=executor.summary)


def capacity_of(executor: Executor) -> Capacity:
    """What the others are told of it."""
    return Capacity(
        **msgspec.structs.asdict(executor.capacity),
        tasks=list(executor.tasks),
        generates=executor.generates,
        labels=executor.labels,
        adapters=executor.adapters,
        repeats=executor.repeats,
    )


def attached(executor: Executor, epoch: int, rank: int) -> Attached:
    """What its scheduler is told of it."""
    return Attached(
        *(epoch, rank, executor.capacity, executor.shape, list(executor.tasks)),
        executor.generates,
        executor.labels,
        executor.adapters,
        places=0 if executor.loader is None else executor.loader.adapters.places,
        resident=[] if executor.loader is None else list(executor.loader.adapters.numbers),
        repeats=executor.repeats,
    )


def say_account(executor: Executor, log: Logger) -> None:
    """What its memory is used for: a line for each part, so that they stay aligned."""
    account = executor.account
    if account is None:
        return
    for line in table(account):
        log.info(f"memory  {line}")
    if account.overdrawn:
        log.warning(
            "more memory is in use than was counted: steps may fail for want of it; lower "
            "--gpu-memory-utilization",
            counted=account.counted,
            in_use=account.in_use,
        )
