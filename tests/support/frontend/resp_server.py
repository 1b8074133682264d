"""A small server that speaks RESP, the protocol of Valkey and Redis, over a real socket."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

OK = b"+OK\r\n"


class RespServer(socketserver.ThreadingTCPServer):
    """Knows what a store of responses asks for, in databases of strings."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, password: str = "") -> None:
        super().__init__(("127.0.0.1", 0), _Conversation)
        self.password = password
        self.kept: dict[tuple[int, bytes], bytes] = {}
        """By database and key."""
        self.lives: dict[tuple[int, bytes], int] = {}
        """Seconds, likewise."""
        self.commands: list[bytes] = []
        self.is_full = False
        self.answers = threading.Event()
        """Until it is set, no command about a key gets an answer."""
        self.answers.set()

    @property
    def port(self) -> int:
        port: int = self.server_address[1]
        return port


class _Conversation(socketserver.StreamRequestHandler):
    server: RespServer
    db = 0
    is_known = False

    def handle(self) -> None:
        while line := self.rfile.readline():
            words = [self._word() for _ in range(int(line[1:]))]
            self.server.commands.append(words[0].upper())
            try:
                self.wfile.write(self._answer(words[0].upper(), words[1:]))
            except OSError:
                return

    def _word(self) -> bytes:
        size = int(self.rfile.readline()[1:])
        return self.rfile.read(size + 2)[:size]

    def _answer(self, command: bytes, words: list[bytes]) -> bytes:
        server = self.server
        if command == b"AUTH":
            self.is_known = words[-1] == server.password.encode()
            return OK if self.is_known else b"-WRONGPASS invalid username-password pair\r\n"
        if server.password and not self.is_known:
            return b"-NOAUTH Authentication required.\r\n"
        if command == b"SELECT":
            self.db = int(words[0])
        if command in (b"SELECT", b"CLIENT"):
            return OK
        if command == b"PING":
            return b"+PONG\r\n"
        server.answers.wait()
        key = (self.db, words[0])
        if command == b"SET":
            if server.is_full:
                return b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"
            server.kept[key], server.lives[key] = words[1], int(words[3])
            return OK
        if command == b"DEL":
            return b":%d\r\n" % (server.kept.pop(key, None) is not None)
        if command == b"GETEX":
            if key not in server.kept:
                return b"$-1\r\n"
            server.lives[key] = int(words[2])
            return _bulk(server.kept[key])
        if command == b"KEYS":
            found = [name for db, name in server.kept if db == self.db]
            return b"*%d\r\n" % len(found) + b"".join(map(_bulk, found))
        if command == b"EXPIRE":
            server.lives[key] = int(words[1])
            return b":1\r\n"
        if command == b"TTL":
            return b":%d\r\n" % server.lives[key]
        return b"-ERR unknown command\r\n"


def _bulk(text: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(text), text)


@contextmanager
def resp_server(**settings: Any) -> Iterator[RespServer]:
    server = RespServer(**settings)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.answers.set()
        server.shutdown()
        server.server_close()
