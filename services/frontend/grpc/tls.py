"""gRPC over TLS, with the certificates of HTTP."""

from __future__ import annotations

import logging
import os
import ssl
from pathlib import Path

import grpc

from penstock.protocol.config import ConfigError
from penstock.protocol.config.server_fields import ServerConfig

_log = logging.getLogger("penstock.frontend")


def credentials_of(config: ServerConfig) -> grpc.ServerCredentials | None:
    """``None``: without TLS. Raises ``ConfigError``."""
    if not config.tls_cert:
        return None
    pair = _Pair(Path(config.tls_cert).expanduser(), Path(config.tls_key).expanduser())
    try:
        first = pair.read()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--tls-cert {config.tls_cert} and --tls-key {config.tls_key} cannot be used: {error}"
        ) from None
    # What it is typed for leaves out that None means no change.
    return grpc.dynamic_ssl_server_credentials(first, pair.changed)  # type: ignore[arg-type]


class _Pair:
    def __init__(self, certificate: Path, key: Path) -> None:
        self._certificate = certificate
        self._key = key
        self._seen = self._stamp()

    def read(self) -> grpc.ServerCertificateConfiguration:
        """Raises ``OSError`` and ``ValueError`` where the files are no pair."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._certificate, self._key, password=lambda: b"")
        pair = self._key.read_bytes(), self._certificate.read_bytes()
        return grpc.ssl_server_certificate_configuration([pair])

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """The files, if they have changed; asked at each handshake, in a thread of gRPC's."""
        stamp = self._stamp()
        if stamp == self._seen:
            return None
        self._seen = stamp
        try:
            return self.read()
        except (OSError, ValueError) as error:
            _log.warning("gRPC's certificate stays as it was: %s: %s", self._certificate, error)
            return None

    def _stamp(self) -> list[tuple[int, int, int]]:
        found = []
        for path in (self._certificate, self._key):
            if path.exists():
                status = os.stat(path)
                found.append((status.st_ino, status.st_size, status.st_mtime_ns))
        return found
