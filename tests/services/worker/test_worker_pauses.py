"""What a worker does in a pause between steps, and what is none."""

from __future__ import annotations

from penstock.protocol.process import logs
from penstock.protocol.process.participant import Status
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.services.worker.null_engine import NullExecutor
from penstock.services.worker.pauses import IDLE_SECONDS, Pauses


class Prepared(NullExecutor):
    """Counts how often it was prepared."""

    times = 0

    def prepare(self) -> None:
        self.times += 1


def test_what_comes_seldom_is_prepared_once_in_each_pause() -> None:
    executor = Prepared(EngineSizes(8, 16, 2, 32, 64, 100), [])
    pauses = Pauses(Status(), logs.set_up("worker", "error", "json"))
    pauses.begin(10.0)
    found = []
    for due, now in ((0, 10.1), (0, 11.0), (0, 12.0), (1, 12.1), (1, 12.2), (1, 13.0)):
        pauses.tidy(executor, due, now, copying=False)
        found.append(executor.times)
    assert found == [0, 1, 1, 1, 1, 2]


def test_while_blocks_are_copied_nothing_is_prepared() -> None:
    executor = Prepared(EngineSizes(8, 16, 2, 32, 64, 100), [])
    pauses = Pauses(Status(), logs.set_up("worker", "error", "json"))
    pauses.begin(10.0)
    for tick in range(20):
        pauses.tidy(executor, 0, 10.0 + 0.25 * tick, copying=True)
    assert executor.times == 0
    ended = 10.0 + 0.25 * 19
    pauses.tidy(executor, 0, ended + IDLE_SECONDS / 2, copying=False)
    assert executor.times == 0, "the pause began when the copies were over"
    pauses.tidy(executor, 0, ended + 2 * IDLE_SECONDS, copying=False)
    assert executor.times == 1
