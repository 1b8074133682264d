"""Certificates from files, which are read again when they change; for HTTP and gRPC the same."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from penstock.protocol.config import ConfigError
from penstock.protocol.config.server_fields import ServerConfig
from penstock.protocol.process import logs

LOOK_SECONDS = 5.0

_log = logging.getLogger("penstock.frontend")


class Pair(NamedTuple):
    """A certificate and its key, as PEM, and what shakes hands with them."""

    certificate: bytes
    key: bytes
    context: ssl.SSLContext


class Certificates:
    """The pair of files of one server. What has shaken hands keeps its certificate."""

    def __init__(self, certificate: Path, key: Path, look_s: float = LOOK_SECONDS) -> None:
        """Raises ``ConfigError`` where they are no pair."""
        self._certificate = certificate
        self._key = key
        self._look_s = look_s
        self._seen = self._stamp()
        try:
            self.pair = self._read()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--tls-cert {certificate} and --tls-key {key} cannot be used: {_said(error)}"
            ) from None
        self._looking = threading.Lock()
        self._watching: asyncio.Task[None] | None = None

    def _read(self) -> Pair:
        """Each file is read once, so that what was found to be a pair is what is used. Raises
        ``OSError`` and ``ValueError``."""
        return pair_of(self._certificate.read_bytes(), self._key.read_bytes())

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
        changes nothing: the old one stays, and the log says why. Any thread may call it."""
        with self._looking:
            stamp = self._stamp()
            if stamp == self._seen:
                return
            self._seen = stamp  # of before: what is written from here on is a further change
            try:
                self.pair = self._read()
            except (OSError, ValueError) as error:
                _log.warning(
                    "the certificate stays as it was: --tls-cert %s and --tls-key %s cannot be "
                    "used: %s",
                    *(self._certificate, self._key, _said(error)),
                )
            else:
                logs.record("info", "certificate read again", {"file": str(self._certificate)})

    def _stamp(self) -> tuple[tuple[int, int, int], ...]:
        found = []
        for path in (self._certificate, self._key):
            with contextlib.suppress(OSError):
                status = os.stat(path)
                found.append((status.st_ino, status.st_size, status.st_mtime_ns))
        return tuple(found)


def pair_of(certificate: bytes, key: bytes) -> Pair:
    """Raises ``ssl.SSLError``, an ``OSError``, and ``ValueError`` where they are no pair."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    with _as_file(certificate) as first, _as_file(key) as second:
        # A key with a password would ask for it on the terminal.
        context.load_cert_chain(first, second, password=lambda: b"")
    return Pair(certificate, key, context)


@contextlib.contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """A path of a file that is in memory alone: OpenSSL's context reads nothing but files."""
    descriptor = os.memfd_create("tls", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def certificates_of(config: ServerConfig) -> Certificates | None:
    """``None``: without TLS. Raises ``ConfigError``."""
    if not config.tls_cert:
        return None
    return Certificates(Path(config.tls_cert).expanduser(), Path(config.tls_key).expanduser())


def _said(error: Exception) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
