"""This process as a member of a small system of real processes: a test plays one part."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from support.protocol.forks import Fork, shared_forks

from penstock.protocol.process.participant import BeatThread, Participant
from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.mailbox import Mailbox
from penstock.protocol.wire.messages.membership import Capacity, Identity, Peer, Phase
from penstock.services.launcher.builtin_model import builtin_model

PATIENCE = 60.0
"""Seconds for anything that is to come, on a busy machine."""
M = TypeVar("M")


class Member:
    """A mailbox that has joined as ``service`` and keeps what it is sent."""

    def __init__(self, service: str, router: str, capacity: Capacity | None = None) -> None:
        self.mailbox = Mailbox(router.rpartition("/")[0])
        identity = Identity(os.getpid(), "test", engine="0", model="model")
        self.participant = Participant(service, self.mailbox, router, identity)
        self.participant.status.phase = Phase.READY
        self.participant.status.capacity = capacity or Capacity()
        self.received: list[Message] = []
        self._beats = BeatThread(self.participant, self.mailbox)
        self._beats.start()

    def pump(self, seconds: float = 0.02) -> None:
        self.participant.tick(time.monotonic())
        self.mailbox.flush()
        self.mailbox.wait(seconds)
        for sender, message in self.mailbox.drain():
            if not self.participant.handle(sender, message, time.monotonic()):
                self.received.append(message)

    def wait(self, seconds: float) -> None:
        """Take messages for so long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.pump()

    def peer(self, service: str) -> Peer:
        """The first ready process of a service."""
        deadline = time.monotonic() + PATIENCE
        while True:
            for peer in self.participant.of(service):
                if peer.phase == Phase.READY or service == "scheduler":
                    return peer
            assert time.monotonic() < deadline, f"no {service} came"
            self.pump()

    def send(self, to: str, message: Message) -> None:
        """Send, and see it off: nobody pumps while the test looks elsewhere."""
        assert self.mailbox.send(to, message)
        deadline = time.monotonic() + PATIENCE
        while not self.mailbox.flush():
            assert time.monotonic() < deadline
            self.pump()

    def next(self, kind: type[M], seconds: float = PATIENCE) -> M:
        """The next message of a kind; those of other kinds before it are forgotten."""
        deadline = time.monotonic() + seconds
        while True:
            while self.received:
                message = self.received.pop(0)
                if isinstance(message, kind):
                    return message
            assert time.monotonic() < deadline, f"no {kind.__name__} came"
            self.pump()

    def silence(self, kind: type, seconds: float = 0.3) -> bool:
        """Whether no message of a kind comes within so many seconds."""
        self.wait(seconds)
        return not any(isinstance(message, kind) for message in self.received)

    def close(self) -> None:
        self._beats.stop()
        self.mailbox.close(0)


Start = Callable[..., Any]
"""Gives a ``Popen``, or what has its names."""
Join = Callable[..., Member]


FORKED = (
    "penstock.services.cli",
    *(f"penstock.services.{one}.service" for one in ("router", "scheduler", "worker")),
)


@contextlib.contextmanager
def small_system() -> Iterator[tuple[Start, Join]]:
    """A router, and functions that start a service and that join this process to it."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pst", dir="/tmp"))
        router = f"ipc://{folder}/router.sock"

        def start(service: str, *flags: str, script: Path | None = None) -> Any:
            model = [] if service == "router" else ["--model", str(builtin_model())]
            given = ["--router", router, *model, *flags]
            process: Fork | subprocess.Popen[str]
            if script is None:
                forks = shared_forks(*FORKED)
                process = forks.start("penstock.services.cli", "main", [service, *given])
            else:
                process = subprocess.Popen(
                    [sys.executable, str(script), *given],
                    stderr=subprocess.PIPE,
                    text=True,
                    cwd=Path(__file__).parents[2],
                    env={**os.environ, "PYTHONPATH": ".:tests"},
                )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            return process

        def join(service: str, capacity: Capacity | None = None) -> Member:
            member = Member(service, router, capacity)
            stack.callback(member.close)
            return member

        start("router")
        yield start, join
