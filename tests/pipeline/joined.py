"""Clients of the library that share processes: starting them is most of what a client costs."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from unittest import mock

from penstock.services.library import async_llm, local_pipeline


class JoinedServer:
    """In the place of a ``ServerProcess``: one that runs already, which others end."""

    def __init__(self, process: subprocess.Popen[bytes] | subprocess.Popen[str], router: str):
        self.process = process
        self._router = router

    def wait_ready(self) -> str:
        return self._router

    def last_words(self) -> str:
        return ""

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def release(self) -> None:
        pass

    def close(self) -> None:
        pass


@contextlib.contextmanager
def joining(
    process: subprocess.Popen[bytes] | subprocess.Popen[str], router: str
) -> Iterator[None]:
    """Clients that start in this block join what a process of ``penstock serve`` has started.
    router: its router's address."""

    def joined(settings: object, caller: str = "") -> JoinedServer:
        return JoinedServer(process, router)

    with (
        mock.patch.object(async_llm, "ServerProcess", joined),
        mock.patch.object(local_pipeline, "ServerProcess", joined),
    ):
        yield
