"""The name service that a container engine gives each container, for a simulated host."""

from __future__ import annotations

import socket
import struct
import threading
from pathlib import Path

from support.pipeline.simulated_hosts import Host, NamespaceHosts


class NameService:
    """Answers as the engine's own name service does: all addresses of a service, UDP, port 53."""

    def __init__(self, hosts: NamespaceHosts, asker: Host) -> None:
        self._hosts, self._asker = hosts, asker
        (Path("/etc/netns") / asker.namespace / "resolv.conf").write_text("nameserver 127.0.0.11\n")
        with asker.entered():
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            self._socket.bind(("127.0.0.11", 53))
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> NameService:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                query, sender = self._socket.recvfrom(4096)
            except OSError:
                return
            end = query.index(b"\0", 12)
            labels, at = [], 12
            while at < end:
                labels.append(query[at + 1 : at + 1 + query[at]].decode())
                at += 1 + query[at]
            found = self._hosts.found_by(self._asker, ".".join(labels))
            head = query[:2] + struct.pack(">5H", 0x8180, 1, len(found), 0, 0)
            answers = b"".join(
                b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 1, 4) + socket.inet_aton(address)
                for address in found
            )
            self._socket.sendto(head + query[12 : end + 5] + answers, sender)
