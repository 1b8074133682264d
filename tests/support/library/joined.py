"""Clients of the library that share processes: starting them is most of what a client costs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

from penstock import LLM, AsyncLLM
from penstock.services.library import async_llm, local_pipeline
from penstock.services.library.server_process import ServerProcess, arguments_for


class JoinedServer:
    """In the place of a ``ServerProcess``: the running one of another client, which ends it."""

    def __init__(self, owner: LLM | AsyncLLM) -> None:
        client = owner._client if isinstance(owner, LLM) else owner._processes.client
        server = owner._server if isinstance(owner, LLM) else owner._processes.server
        assert client is not None and isinstance(server, ServerProcess)
        self._server, self._router = server, client._router
        self.process = server.process

    def wait_ready(self) -> str:
        return self._router

    def last_words(self) -> str:
        return self._server.last_words()

    @property
    def alive(self) -> bool:
        return self._server.alive

    def release(self) -> None:
        pass

    def close(self) -> None:
        pass


@contextlib.contextmanager
def joining(owner: LLM | AsyncLLM) -> Iterator[None]:
    """Clients that start in this block join the processes of ``owner``, and must be given what
    these were started with."""

    def joined(settings: Mapping[str, Any], caller: str) -> JoinedServer:
        server = JoinedServer(owner)
        flags = arguments_for({"log_level": "warning", **settings}, caller)
        assert server.process.args[-len(flags) - 1 :] == ["1", *flags]
        return server

    with (
        mock.patch.object(async_llm, "ServerProcess", joined),
        mock.patch.object(local_pipeline, "ServerProcess", joined),
    ):
        yield
