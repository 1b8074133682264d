"""What ends a worker's process: a device that breaks, wherever the break shows, and one that cannot
be taken over."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from penstock.protocol.config import ClusterConfig, Config
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.protocol.wire.messages.membership import Phase
from penstock.protocol.wire.messages.steps import Attach, StepPlan, StepResult
from penstock.services.worker.executor import DeviceFailed
from penstock.services.worker.load_report import LoadReport
from penstock.services.worker.loading import Loaded, Progress
from penstock.services.worker.null_engine import NullExecutor
from penstock.services.worker.service import WorkerService


class BrokenDevice(NullExecutor):
    """Like a CUDA device after a fault: every call but the first attachment's reports it."""

    broken = False

    def launch(self, plan: StepPlan) -> None:
        self.broken = True
        raise RuntimeError("unspecified launch failure")

    def finished(self, wait: bool = False) -> StepResult | None:
        return super().finished(wait)

    def reset(self) -> None:
        if self.broken:
            raise RuntimeError("unspecified launch failure")
        super().reset()


class BrokenInFlight(NullExecutor):
    """The fault shows when a step that was launched is asked for."""

    in_flight = 1

    def finished(self, wait: bool = False) -> StepResult | None:
        raise RuntimeError("an illegal memory access was encountered")


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[WorkerService]:
    service = WorkerService(Config(cluster=ClusterConfig(router=f"ipc://{tmp_path}/router.sock")))
    yield service
    service.mailbox.close()


CAPACITY = EngineSizes(8, 16, 2, 32, 64, 100)


@pytest.mark.parametrize("executor", [BrokenDevice(CAPACITY, []), BrokenInFlight(CAPACITY, [])])
def test_a_broken_device_ends_the_process(worker: WorkerService, executor: NullExecutor) -> None:
    worker.executor = executor
    now = time.monotonic()
    worker.on_message(1, Attach(5, worker.mailbox.address), now)
    with pytest.raises(DeviceFailed):  # the loop logs what a message's handler raises
        worker.on_message(1, StepPlan(5, 1, True, [], [], [], []), now)
    with pytest.raises(DeviceFailed, match=r"launch failure|illegal memory access"):
        worker.work(now)


@pytest.mark.parametrize("executor", [NullExecutor(CAPACITY, []), None])
def test_a_prepared_worker_is_ready_at_once_or_its_process_ends(
    executor: NullExecutor | None, tmp_path: Path
) -> None:
    config = Config(cluster=ClusterConfig(router=f"ipc://{tmp_path}/router.sock"))

    def take_over(config: Config, progress: Progress, loaded: Loaded) -> NullExecutor:
        loaded(LoadReport(1000, 0.1, mapped=True))
        if executor is None:
            raise RuntimeError("cuMemMap: out of memory (2)")
        return executor

    service = WorkerService(config, take_over)
    try:
        service._load()
        service._loader = cast(Any, "over")
        if executor is None:
            with pytest.raises(RuntimeError, match="out of memory"):
                service._finish_loading()
            return
        service._finish_loading()
        assert service.executor is executor and service.status.phase == Phase.READY
    finally:
        service.mailbox.close()
