"""An attack on a running server, and what must hold meanwhile and afterwards.

While an attack runs, an innocent client streams greedy completions one after the other, and
another asks for the server's health. ``besieged`` checks at the end that

- every innocent answer had the text that it has in peace,
- health was 200 all the time, and soon,
- the same processes are alive,
- nothing runs, waits or holds KV blocks any more,
- memory has not grown by more than ``GROWTH_BYTES``,
- no log line, and no answer to the attacker, shows an address, a path, a traceback, a key or the
  innocent prompt.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
from support.pipeline.served import Served

KEYS = ["first-key-of-the-tests", "second-key-of-the-tests"]
FLAGS = (
    *("--device", "cpu", "--dtype", "float32", "--threads", "1"),
    *("--kv-cache-memory-bytes", str(32 * 1024 * 1024)),
)
"""KV memory becomes resident as it is used, so the worker grows by as much as it may have."""
WAYS = ["", pytest.param("1", marks=pytest.mark.chaos)]
"""Values of PYTHONOPTIMIZE for the server: 1 removes every ``assert``."""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPT = "orchid-7351 by the waterwheel"
BODY = {
    "prompt": PROMPT,
    "max_tokens": 20,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
}
KV_BYTES = 32 * 1024 * 1024
GROWTH_BYTES = 64 * 1024 * 1024 + KV_BYTES
"""KV memory becomes resident as it is used."""
HEALTH_SECONDS = (1.0, 15.0)
"""/health: half of the answers, and the slowest. A machine that does nothing else takes 0.01 and
0.2 s."""
ANSWER_SECONDS = 10.0
"""An attack is answered or cut off by then; a machine that does nothing else takes 0.1 s."""
PRIVATE = re.compile(r"0x[0-9a-fA-F]{6,}|Traceback|site-packages|\.py\b|/work/|/home/|/root/")
_BUSY = ("requests_running", "requests_waiting", "queue_depth", "kv_blocks_used")


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    seconds: float

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def message(self) -> str:
        return str(self.json["error"]["message"])


class Attacker:
    """Sends what no honest client sends."""

    def __init__(self, server: Served, keys: list[str] | None = None) -> None:
        self.server = server
        self.host, _, port = server.url.removeprefix("http://").partition(":")
        self.port = int(port)
        self.keys = keys or []

    @property
    def authority(self) -> str:
        return f"{self.host}:{self.port}"

    def request(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        """One request on a connection of its own. Names of headers are written with ``_``."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        began = time.monotonic()
        connection = http.client.HTTPConnection(self.host, self.port, timeout=30)
        try:
            connection.request(method, path, body, named)
            response = connection.getresponse()
            raw = response.read()
        finally:
            connection.close()
        found = {name.lower(): value for name, value in response.getheaders()}
        answer = Answer(response.status, found, raw, time.monotonic() - began)
        self.check_shown(raw.decode(errors="replace") + repr(found))
        return answer

    def post(self, path: str, body: bytes | dict[str, Any], **headers: str) -> Answer:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.request("POST", path, raw, **{"Content_Type": "application/json", **headers})

    def connect(self, data: bytes = b"", *, timeout: float = 30.0) -> socket.socket:
        client = socket.create_connection((self.host, self.port), timeout=timeout)
        client.sendall(data)
        return client

    def raw(self, data: bytes, *, timeout: float = 30.0) -> bytes:
        """Send bytes; what came back until the server closed the connection."""
        with self.connect(data, timeout=timeout) as client:
            return self.read_all(client)

    def read_all(self, client: socket.socket) -> bytes:
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while part := client.recv(65536):
                answer += part
        self.check_shown(answer.decode(errors="replace"))
        return answer

    def check_shown(self, text: str) -> None:
        """Nothing of the inside, and nothing of others, is in an answer or a log."""
        assert not PRIVATE.search(text), text[:2000]
        for secret in (PROMPT, *self.keys):
            assert secret not in text, text[:2000]


def refused(answer: Answer, status: int = 400) -> str:
    """The message of a refusal in the shape of all errors."""
    assert answer.status == status, (answer.status, answer.body[:500])
    error = answer.json["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert len(error["message"]) < 1000
    assert answer.seconds < ANSWER_SECONDS
    return str(error["message"])


class Innocent:
    """Streams the same greedy completion again and again, and asks for health beside it."""

    def __init__(self, attacker: Attacker) -> None:
        self._attacker = attacker
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._stream), threading.Thread(target=self._ask)]
        self.texts: list[str] = []
        self.health: list[tuple[int, float]] = []
        self.faults: list[str] = []

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _stream(self) -> None:
        """The last one begins when the attack is over."""
        ended = False
        while not ended:
            ended = self._stop.wait(1.5 if self.texts else 0.0)
            try:
                self.texts.append(whole_text(self._attacker))
            except Exception as error:
                self.faults.append(repr(error))

    def _ask(self) -> None:
        while not self._stop.wait(0.2):
            began = time.monotonic()
            try:
                status = self._attacker.request("GET", "/health").status
            except Exception as error:
                self.faults.append(repr(error))
            else:
                self.health.append((status, time.monotonic() - began))


def whole_text(attacker: Attacker) -> str:
    """The innocent completion, streamed to its end."""
    headers = {"Content-Type": "application/json"}
    if attacker.keys:
        headers["x-api-key"] = attacker.keys[0]
    connection = http.client.HTTPConnection(attacker.host, attacker.port, timeout=60)
    try:
        connection.request("POST", COMPLETIONS, json.dumps(BODY), headers)
        response = connection.getresponse()
        raw = response.read().decode()
    finally:
        connection.close()
    if response.status != 200 or not raw.endswith("data: [DONE]\n\n"):
        raise AssertionError(f"{response.status}: {raw[-500:]}")
    events = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
    return "".join(event["choices"][0]["text"] for event in events)


def peaceful_text(attacker: Attacker) -> str:
    """The innocent text, before anybody attacks.

    The engine has seen full batches of every kind by then, and the memory that they take for the
    first time.
    """
    first = whole_text(attacker)
    headers = {"x_api_key": attacker.keys[0]} if attacker.keys else {}
    crowd = {"prompt": [[5 + n] * 100 for n in range(3)], "n": 32, "max_tokens": 8}
    for fields in ({"temperature": 0}, {"top_k": 5}, {"top_p": 0.5}, {"top_k": 5, "top_p": 0.5}):
        assert attacker.post(COMPLETIONS, {**crowd, **fields}, **headers).status == 200
    assert whole_text(attacker) == first, "the second time its prompt is in the cache"
    return first


def members(server: Served) -> dict[int, psutil.Process]:
    """All processes of a server but the helper that vets grammars: it starts at the first one, and
    it and its children may be ruined by them."""
    found = {}
    for pid, process in server.processes().items():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "grammar" not in " ".join(process.cmdline()):
                found[pid] = process
    return found


def memory(server: Served) -> dict[int, int]:
    """Bytes that each process holds for itself, swapped out or not."""
    found = {}
    for pid in members(server):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as lines:
            sizes = dict(line.split(":", 1) for line in lines)
            kilobytes = [int(sizes[name].split()[0]) for name in ("RssAnon", "VmSwap")]
            found[pid] = sum(kilobytes) * 1024
    return found


def lives(server: Served) -> set[tuple[int, float]]:
    return {(pid, process.create_time()) for pid, process in members(server).items()}


def settle(attacker: Attacker, seconds: float = 60.0) -> None:
    """Nothing runs, waits or holds blocks: told by counters that are half a second old."""
    headers = {"x_api_key": attacker.keys[0]} if attacker.keys else {}
    deadline = time.monotonic() + seconds
    while True:
        text = attacker.request("GET", "/metrics", **headers).body.decode()
        busy = [
            line
            for line in text.splitlines()
            if line.startswith(tuple("penstock_" + name for name in _BUSY))
            and not line.endswith((" 0", " 0.0"))
        ]
        if not busy:
            return
        assert time.monotonic() < deadline, busy
        time.sleep(0.1)


@contextlib.contextmanager
def besieged(
    attacker: Attacker, peace: str, *, growth_bytes: int = GROWTH_BYTES
) -> Iterator[Attacker]:
    """``peace``: the innocent text that the server gives when nobody attacks it."""
    server = attacker.server
    born, held, said = lives(server), memory(server), len(server.lines)
    innocent = Innocent(attacker)
    innocent.start()
    try:
        yield attacker
    finally:
        innocent.stop()
    assert innocent.faults == []
    assert set(innocent.texts) == {peace}
    assert {status for status, _ in innocent.health} <= {200}
    waits = sorted(seconds for _, seconds in innocent.health)
    assert len(waits) < 5 or waits[len(waits) // 2] < HEALTH_SECONDS[0], waits
    assert not waits or waits[-1] < HEALTH_SECONDS[1], waits
    assert lives(server) == born
    settle(attacker)
    after = memory(server)
    growth = {server.role_of(server.processes()[pid]): after[pid] - held[pid] for pid in held}
    assert sum(growth.values()) < growth_bytes, growth
    for line in server.lines[said:]:
        attacker.check_shown(line)
        assert '"level": "error"' not in line, line
