"""HTTP over TLS: certificates from files, which are read again when they change."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
from pathlib import Path

from penstock.protocol.config import ConfigError
from penstock.protocol.config.server_fields import ServerConfig
from penstock.protocol.process import logs

LOOK_SECONDS = 5.0

_log = logging.getLogger("penstock.frontend")


class Certificates:
    """The pair of files of one server. What has shaken hands keeps its certificate."""

    def __init__(self, certificate: Path, key: Path, look_s: float = LOOK_SECONDS) -> None:
        """Raises ``ConfigError`` where they are no pair."""
        self._certificate = certificate
        self._key = key
        self._look_s = look_s
        self._seen = self._stamp()
        try:
            self.context = self._made()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--tls-cert {certificate} and --tls-key {key} cannot be used: {_said(error)}"
            ) from None
        self._watching: asyncio.Task[None] | None = None

    def _made(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # A key with a password would ask for it on the terminal.
        context.load_cert_chain(self._certificate, self._key, password=lambda: b"")
        return context

    def begin(self) -> None:
        """Look after the files from now on."""
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def end(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._look_s)
            self.look()

    def look(self) -> None:
        """Use the files for who connects from now on, if they have changed. What is no pair
        changes nothing: the old one stays, and the log says why."""
        stamp = self._stamp()
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._made()  # a context that has failed to load a pair is not to be used
            self.context.load_cert_chain(self._certificate, self._key, password=lambda: b"")
        except (OSError, ValueError) as error:
            _log.warning("the certificate stays as it was: %s: %s", self._certificate, _said(error))
        else:
            logs.record("info", "certificate read again", {"file": str(self._certificate)})

    def _stamp(self) -> tuple[tuple[int, int, int], ...]:
        found = []
        for path in (self._certificate, self._key):
            with contextlib.suppress(OSError):
                status = os.stat(path)
                found.append((status.st_ino, status.st_size, status.st_mtime_ns))
        return tuple(found)


def certificates_of(config: ServerConfig) -> Certificates | None:
    """``None``: without TLS. Raises ``ConfigError``."""
    if not config.tls_cert:
        return None
    return Certificates(Path(config.tls_cert).expanduser(), Path(config.tls_key).expanduser())


def _said(error: Exception) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
