"""Clients of the library that share processes: starting them is most of what a client costs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from penstock import LLM
from penstock.services.library import async_llm, local_pipeline


class JoinedServer:
    """In the place of a ``ServerProcess``: the running one of another client, which ends it."""

    def __init__(self, owner: LLM) -> None:
        self._owner = owner
        self.process = owner._server.process

    def wait_ready(self) -> str:
        return self._owner._client._router

    def last_words(self) -> str:
        return self._owner._server.last_words()

    @property
    def alive(self) -> bool:
        return self._owner._server.alive

    def release(self) -> None:
        pass

    def close(self) -> None:
        pass


@contextlib.contextmanager
def joining(owner: LLM) -> Iterator[None]:
    """Clients that start in this block join the processes of ``owner``."""

    def joined(settings: object, caller: str = "") -> JoinedServer:
        return JoinedServer(owner)

    with (
        mock.patch.object(async_llm, "ServerProcess", joined),
        mock.patch.object(local_pipeline, "ServerProcess", joined),
    ):
        yield
