"""The processes themselves: what they listen on, whom they call, and what bytes do to them."""

from __future__ import annotations

import contextlib
import os
import pickle  # noqa: TID251
import random
import socket
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import zmq
from support.pipeline.in_process import called
from support.pipeline.served import Served
from support.polling import until
from support.security.siege import COMPLETIONS, Attacker, besieged, settle, whole_text


class _Bomb:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.mark),)


def inboxes(server: Served) -> list[Path]:
    return sorted(Path(server.router.removeprefix("ipc://")).parent.glob("*.sock"))


def test_only_the_http_port_listens_and_only_on_its_address(attack: Attacker) -> None:
    heard = set()
    for process in attack.server.processes().values():
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN or connection.type == socket.SOCK_DGRAM:
                heard.add((connection.laddr.ip, connection.laddr.port))
    assert heard == {("127.0.0.1", attack.port)}


def test_internal_sockets_are_in_a_folder_for_their_user_alone(attack: Attacker) -> None:
    paths = inboxes(attack.server)
    assert len(paths) == len(attack.server.lasting())  # the launcher has one, too
    place = paths[0].parent.stat()
    assert stat.S_IMODE(place.st_mode) == 0o700
    assert place.st_uid == os.getuid()
    for process in attack.server.processes().values():
        for connection in process.net_connections("unix"):
            name = connection.laddr
            if connection.status == psutil.CONN_LISTEN or name:
                assert not str(name).startswith("@"), "an abstract name has no permissions"
                assert not str(name).endswith(".sock") or Path(name).parent == paths[0].parent


def hostile_frames(mark: Path) -> list[bytes]:
    source = random.Random(3)
    pickled = [pickle.dumps(_Bomb(mark), protocol) for protocol in range(6)]
    nested = b"\x91" * 100_000
    prefix = (5).to_bytes(8, "little")
    noise = [source.randbytes(source.randrange(1, 300)) for _ in range(200)]
    huge = [b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"]
    bodies = [*pickled, *huge, *noise, nested, b"", b"\xc1", b"\x92" + b"\xa1x" * 2]
    return [*bodies, *(prefix + body for body in bodies)]


def test_bytes_of_strangers_at_internal_sockets_are_counted_and_dropped(
    attack: Attacker, tmp_path: Path
) -> None:
    mark = tmp_path / "executed"
    frames = hostile_frames(mark)
    before = attack.server.metrics()["penstock_malformed_frames_total"]
    with zmq.Context() as context:
        for path in inboxes(attack.server):
            with context.socket(zmq.PUSH) as push:
                push.linger = 5000
                push.connect(f"ipc://{path}")
                for frame in frames:
                    push.send(frame)
            for data in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 1000, frames[0], b"\x01\x00" * 500):
                with socket.socket(socket.AF_UNIX) as raw, contextlib.suppress(OSError):
                    raw.connect(str(path))
                    raw.sendall(data)
    wanted = before + 5 * len(frames) * 0.9  # of five processes; the launcher reports none
    until(
        lambda: attack.server.metrics()["penstock_malformed_frames_total"] >= wanted,
        told=lambda: attack.server.metrics(),
    )
    for frame in frames[:6]:
        attack.post(COMPLETIONS, frame)
        attack.raw(frame + b"\r\n\r\n")
    assert not mark.exists()
    pickle.loads(frames[0])
    assert mark.exists(), "the bomb would have worked"


def test_nobody_else_is_called_at_start_or_later(attack: Attacker, canary: socket.socket) -> None:
    assert attack.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1}).status == 200
    canary.settimeout(0.1)
    with pytest.raises(TimeoutError):
        canary.accept()
    for process in attack.server.processes().values():
        for connection in process.net_connections("inet"):
            assert not connection.raddr or connection.raddr.ip == "127.0.0.1", connection


def test_without_free_descriptors_a_frontend_serves_on_and_recovers(
    server: Served, peace: str
) -> None:
    """Its limit is lowered while it runs, below what the connections need."""
    attacker = Attacker(server)
    found = [p for p in server.processes().values() if server.role_of(p) == "frontend"]
    limits = found[0].rlimit(psutil.RLIMIT_NOFILE)
    born = set(server.processes())
    said = len(server.lines)
    held = [attacker.connect() for _ in range(5)]
    found[0].rlimit(psutil.RLIMIT_NOFILE, (found[0].num_fds() + 20, limits[1]))
    try:
        for _ in range(100):
            with contextlib.suppress(OSError):
                held.append(attacker.connect(timeout=1.0))
        assert held[0].send(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert held[0].recv(100).startswith(b"HTTP/1.1 200 ")
    finally:
        found[0].rlimit(psutil.RLIMIT_NOFILE, limits)
        for client in held:
            client.close()
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(OSError, AssertionError):
            if whole_text(attacker) == peace:
                break
        assert time.monotonic() < deadline
    assert set(server.processes()) == born
    settle(attacker)
    assert len(server.lines) - said < 50, "a line for each would fill a disk"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "gpu.example.org"])
def test_an_address_beyond_loopback_needs_a_key_or_the_word_for_none(host: str) -> None:
    done = called("serve", "--host", host)
    assert done.returncode == 2
    assert "--api-key" in done.stderr
    assert "--insecure" in done.stderr
    for allowed in (["--insecure"], ["--api-key", "k"]):
        shown = called("serve", "--host", host, *allowed, "--show-config")
        assert shown.returncode == 0, shown.stderr


def test_a_server_under_attack_from_all_sides_at_once_serves_its_clients(
    server: Served, peace: str
) -> None:
    """A little of everything, from many threads."""
    source = random.Random(11)
    bodies = [
        b"",
        b"[" * 10_000,
        b'{"prompt": ""}',
        b'{"prompt": "x", "n": 1e9}',
        b"\xff" * 100,
        b'{"prompt": "x", "max_tokens": 3}',
        b'{"prompt": "%b"}' % (b"a" * 200_000),
    ]

    def strike(attacker: Attacker, seed: int) -> int:
        draw = random.Random(seed)
        if draw.random() < 0.3:
            attacker.raw(draw.randbytes(draw.randrange(1, 500)) + b"\r\n\r\n")
            return 400
        return attacker.post(draw.choice((COMPLETIONS, "/v1/chat/completions", "/x")),
                             draw.choice(bodies)).status  # fmt: skip

    with besieged(Attacker(server), peace) as attacker, ThreadPoolExecutor(8) as threads:
        seeds = [source.randrange(2**32) for _ in range(400)]
        statuses = set(threads.map(lambda seed: strike(attacker, seed), seeds))
    assert statuses <= {200, 400, 404, 413}
