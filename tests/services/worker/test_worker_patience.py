"""How long a worker sleeps between two looks at what is under way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from penstock.protocol.config import ClusterConfig, Config
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.services.worker.kv_copies import Copies
from penstock.services.worker.null_engine import NullExecutor
from penstock.services.worker.service import COPIES_SECONDS, LONG_STEP_SECONDS, WorkerService


class UnderWay(NullExecutor):
    in_flight = 1


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[WorkerService]:
    tmp_path.chmod(0o700)
    service = WorkerService(Config(cluster=ClusterConfig(router=f"ipc://{tmp_path}/router.sock")))
    service.executor = UnderWay(EngineSizes(8, 16, 2, 32, 64, 100), [])
    yield service
    service.mailbox.close()


@pytest.mark.parametrize(
    ("copying", "step_seconds", "patience"),
    [
        (False, 2 * LONG_STEP_SECONDS, 0.0),
        (True, LONG_STEP_SECONDS / 2, 0.0),
        (True, 2 * LONG_STEP_SECONDS, COPIES_SECONDS),
    ],
)
def test_a_step_under_way_is_awaited_without_sleeping_unless_it_is_long_and_blocks_are_copied(
    worker: WorkerService, copying: bool, step_seconds: float, patience: float
) -> None:
    worker._copies = cast(Copies, SimpleNamespace(active=copying))
    worker._step_seconds = step_seconds
    assert worker.patience(0.0) == patience
