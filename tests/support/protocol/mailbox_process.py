"""Another process with a mailbox, for tests that kill, stop and restart it.

``receive BIND [SECRET]`` prints its address, then drains for ever; ``echo`` answers each
``Holding`` with a ``Holding`` to its ``reply_to``; ``idle`` never drains. ``send ADDRESS COUNT``
sends ``COUNT`` messages, closes its mailbox and ends.
"""

from __future__ import annotations

import contextlib
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

from support.protocol.forks import shared_forks

from penstock.protocol.wire.mailbox import Mailbox
from penstock.protocol.wire.messages.requests import Holding, Taken
from penstock.protocol.wire.security import CurveKeys


def main(mode: str, target: str, extra: str = "") -> None:
    if mode == "send":
        mailbox = Mailbox(f"ipc://{Path(target.removeprefix('ipc://')).parent}")
        for number in range(int(extra)):
            mailbox.send(target, Taken(number, 1))
        mailbox.close()
        return
    mailbox = Mailbox(target, keys=CurveKeys(extra) if extra else None)
    print(mailbox.address, flush=True)
    while mode == "idle":
        signal.pause()
    while True:
        mailbox.wait(0.05)
        for _, message in mailbox.drain():
            if mode == "echo" and isinstance(message, Holding):
                mailbox.send(message.reply_to, message)
        mailbox.flush()


class Peer:
    """Another process with a mailbox, and its address."""

    def __init__(self, mode: str, bind: str, secret: str = "") -> None:
        forks = shared_forks(__name__)
        self.process = forks.start(__name__, "main", mode, bind, secret, descriptor=1)
        self.address = self.process.output.readline().decode().strip()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.output.close()


@contextlib.contextmanager
def running(mode: str, bind: str, secret: str = "") -> Iterator[Peer]:
    peer = Peer(mode, bind, secret)
    try:
        yield peer
    finally:
        peer.kill()


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """A private folder with a path short enough for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="pst", dir="/tmp") as name:
        yield Path(name)
