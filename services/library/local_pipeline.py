"""The processes behind a synchronous program: started, joined and ended with one object."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Any, Self

from penstock.services.library.client import PipelineClient
from penstock.services.library.server_process import ServerFailed, ServerProcess


class LocalPipeline:
    """All processes end with ``close``, with this object, with the interpreter, or when this
    process is killed."""

    def __init__(self, model: str = "", **settings: Any) -> None:
        """Return when the engine is ready. Raises ``ServerFailed``, ``ConfigError`` and
        ``TypeError``."""
        given = {"model": model, **settings} if model else settings
        self._server = ServerProcess(given, type(self).__name__)
        try:
            self._client = PipelineClient(self._server.wait_ready())
        except BaseException as error:
            self._server.close()
            if isinstance(error, TimeoutError):
                raise ServerFailed(str(error)) from None
            raise
        self._end = weakref.finalize(self, _end, self._client, self._server)

    def check_open(self) -> None:
        """Raises ``RuntimeError`` after ``close``."""
        if not self._end.alive:
            raise RuntimeError(f"this {type(self).__name__} is closed")

    def check_alive(self) -> None:
        """Raises ``ServerFailed`` where the processes have ended."""
        if not self._server.alive:
            raise ServerFailed(f"the server has ended: {self._server.last_words()}")

    def close(self) -> None:
        """End all processes. The object is of no use afterwards."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _end(client: PipelineClient, server: ServerProcess) -> None:
    client.close()
    server.close()
