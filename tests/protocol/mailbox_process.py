"""Another process with a mailbox, for tests that kill, stop and restart it.

``python mailbox_process.py receive BIND [SECRET]`` prints its address, then drains for ever;
``echo`` answers each ``Holding`` with a ``Holding`` to its ``reply_to``; ``idle`` never drains.
``send ADDRESS COUNT`` sends ``COUNT`` messages, closes its mailbox and ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

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
    """A running ``mailbox_process`` and its address."""

    def __init__(self, mode: str, bind: str, secret: str = "") -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, mode, bind, *([secret] if secret else [])],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONPATH": "."},
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


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


if __name__ == "__main__":
    main(*sys.argv[1:])
