"""Who may talk to us on tcp: one key pair derived from one shared secret.

ZeroMQ's CURVE encrypts and proves the keys; the ZAP handler admits only our own key (without a
handler a PULL socket accepts every client key). On ipc the folder's permissions do this work.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq
import zmq.utils.z85
from zmq.auth.thread import ThreadAuthenticator

from penstock.protocol.private_file import PrivateFileError, read_private_text

MIN_SECRET_LENGTH = 16
OLDEST_LIBZMQ = (4, 3, 3)
"""Older ones have overflows in the parser that anybody reaches before the handshake
(CVE-2019-6250, CVE-2019-13132, CVE-2020-15166)."""
_ZAP_DOMAIN = "penstock"
BAD_HANDSHAKE = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
"""ZeroMQ's events of a connection that does not come about."""


class SecurityError(ValueError):
    """The secret, a folder or an address is not safe to use. The message says what to do."""


def safe_context(
    libzmq: tuple[int, int, int] | None = None,
) -> zmq.Context[zmq.Socket[bytes]]:
    """A new ZeroMQ context. Raises ``SecurityError`` where the library below is unsafe.

    ``libzmq``: its version; default: that of the loaded library.
    """
    version = libzmq or zmq.zmq_version_info()
    if version < OLDEST_LIBZMQ:
        found, needed = (".".join(map(str, one)) for one in (version, OLDEST_LIBZMQ))
        raise SecurityError(
            f"libzmq {found} is loaded; at least {needed} is needed, older ones can be taken over "
            "by whoever reaches a socket: pip install --force-reinstall --only-binary pyzmq pyzmq"
        )
    return zmq.Context()


class CurveKeys:
    """The key pair that every process of a cluster derives from the shared secret."""

    def __init__(self, secret: str) -> None:
        text = secret_text(secret)
        if len(text) < MIN_SECRET_LENGTH:
            raise SecurityError(
                f"--secret has {len(text)} characters; at least {MIN_SECRET_LENGTH} are needed "
                "(for example: openssl rand -hex 32)"
            )
        seed = hashlib.blake2b(text.encode(), digest_size=32, person=b"penstock-curve").digest()
        self.secret = zmq.utils.z85.encode(seed)
        self.public = zmq.curve_public(self.secret)

    def protect_server(self, socket: zmq.Socket[bytes]) -> None:
        socket.curve_server = True
        socket.curve_secretkey = self.secret
        socket.zap_domain = _ZAP_DOMAIN.encode()

    def protect_client(self, socket: zmq.Socket[bytes]) -> None:
        socket.curve_serverkey = self.public
        socket.curve_publickey = self.public
        socket.curve_secretkey = self.secret

    @contextmanager
    def admitted(self, context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[None]:
        """Run the ZAP handler of ``context`` that admits our own key only."""
        authenticator = ThreadAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve_callback(_ZAP_DOMAIN, credentials_provider=self)
        try:
            yield
        finally:
            authenticator.stop()

    def callback(self, domain: str, key: bytes) -> bool:
        """Asked by the ZAP handler for each handshake; ``key`` is in Z85."""
        return key == self.public


def secret_text(secret: str) -> str:
    """The secret itself, of ``file:PATH`` as well. Raises ``SecurityError``."""
    if not secret.startswith("file:"):
        return secret
    try:
        return read_private_text(Path(secret.removeprefix("file:"))).strip()
    except PrivateFileError as error:
        raise SecurityError(f"--secret {secret}: {error}") from None


def handshake_complaint(address: str, keys: CurveKeys | None) -> str:
    """What to say of a peer with which no handshake succeeds."""
    ours = "this process has a --secret" if keys is not None else "this process has no --secret"
    return (
        f"{address} refuses the connection in the handshake: {ours}; all processes of a cluster "
        "need the same one"
    )


def private_folder(path: Path) -> Path:
    """Make ``path`` a folder that only its owner may enter, or check that it is one.

    Raises ``SecurityError`` when it belongs to somebody else, others may enter it, or it is none.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SecurityError(
            f"cannot make the folder {path}: {error.strerror}; choose another --runtime-dir"
        ) from None
    status = path.stat()
    if status.st_uid != os.getuid():
        raise SecurityError(f"{path} belongs to another user; choose another --runtime-dir")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise SecurityError(f"others may enter {path}; chmod 700 {path}")
    return path
