"""The smallest services, and the router, as real processes for the tests of the runtime.

A kind is ``router``, ``async`` or ``loop``. A tiny service answers each ``Holding`` with a
``Holding`` to its ``reply_to``, of which ``attempts`` says how often it has worked, or with
``tells_delay`` how many milliseconds a tick came late at most; it sleeps ``attempt`` milliseconds
for a ``Taken``, and raises for an ``Accepted``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

from support.protocol.forks import PATIENCE, Forks

from penstock.protocol.config import ClusterConfig, Config, LaunchConfig, ObservabilityConfig
from penstock.protocol.config.process_fields import ProcessConfig
from penstock.protocol.process import async_service, loop_service, participant
from penstock.protocol.process.async_service import AsyncService
from penstock.protocol.process.loop_service import LoopService
from penstock.protocol.process.service import Service
from penstock.protocol.wire import codec
from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.messages.membership import Phase
from penstock.protocol.wire.messages.requests import Accepted, Holding, Taken

LONG = 10_000
WORKING = b"it works\n"
"""What is logged again and again during so many milliseconds or more."""
TOLD = b"it is told to end\n"
"""What a loop logs when it gets a signal meanwhile."""


class Echo(Service):
    options: dict[str, Any]
    works = 0
    works_long = False

    def on_message(self, sender: int, message: Message, now: float) -> None:
        match message:
            case Holding():
                answer = Holding(message.reply_to, message.ids, [self.works] * len(message.ids))
                self.mailbox.send(message.reply_to, answer)
            case Taken():
                self.works_long = message.attempt >= LONG
                if self.works_long:
                    for _ in range(message.attempt // 10):
                        os.write(2, WORKING)
                        time.sleep(0.01)
                else:
                    time.sleep(message.attempt / 1000)
            case Accepted():
                raise RuntimeError("cannot handle it")

    def drained(self) -> bool:
        return not self.options.get("busy")

    def on_tick(self, now: float) -> None:
        if self.options.get("failing_tick"):
            raise RuntimeError("the tick fails")


class TinyAsync(Echo, AsyncService):
    name = "tokenizer"

    def on_tick(self, now: float) -> None:
        super().on_tick(now)
        if self.options.get("tells_delay"):
            self.works = max(self.works, round(1000 * self.loop_delay))

    async def start(self) -> None:
        await asyncio.sleep(self.options.get("start_s", 0.0))
        self.set_phase(Phase.READY, "tiny")


class TinyLoop(Echo, LoopService):
    name = "worker"

    def start(self) -> None:
        time.sleep(self.options.get("start_s", 0.0))
        self.set_phase(Phase.READY, "tiny")

    def _on_signal(self, *given: object) -> None:
        if self.works_long:
            os.write(2, TOLD)
        super()._on_signal(*given)

    def work(self, now: float) -> None:
        self.works += 1
        time.sleep(self.options.get("work_s", 0.0))


def main(kind: str, options: dict[str, Any]) -> int:
    config = Config(
        cluster=ClusterConfig(router=options["router"], secret=options.get("secret", "")),
        launch=LaunchConfig(drain_timeout_s=options.get("drain_timeout_s", 30.0)),
        process=ProcessConfig(state_file=options.get("state_file", "")),
        observability=ObservabilityConfig(log_format="json"),
    )
    if "version" in options:
        codec.PROTOCOL_VERSION = options["version"]
    if "tick_s" in options:
        async_service.TICK_SECONDS = loop_service.TICK_SECONDS = options["tick_s"]
        participant.BEAT_SECONDS = 2.5  # the router's answers wake the service as well
    if kind == "router":
        from penstock.services.router.service import run

        return run(config)
    Echo.options = options
    service = TinyAsync(config) if kind == "async" else TinyLoop(config)
    return service.run()


class Running:
    """A tiny service in a process of its own."""

    def __init__(self, forks: Forks, kind: str, router: str, **options: Any) -> None:
        self.process = forks.start(__name__, "main", kind, {"router": router, **options})
        self.pid = self.process.pid

    def ended(self, seconds: float = PATIENCE) -> tuple[int, str]:
        """Waits for the end. Returns (exit code, log)."""
        _, log = self.process.communicate(timeout=seconds)
        return self.process.wait(), log


@contextlib.contextmanager
def started(forks: Forks, kind: str, router: str, **options: Any) -> Iterator[Running]:
    running = Running(forks, kind, router, **options)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.communicate()
