"""A process of the cluster on a simulated host, and plain clients for it."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from support.pipeline.simulated_hosts import Host


class HostProcess:
    """One running process; its standard output and error are kept as lines."""

    def __init__(
        self, name: str, host: Host, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self.name = name
        self.host = host
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            host.command(arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=dict(environment),
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def said(self, *words: str) -> list[str]:
        """Lines that hold all the words."""
        return [line for line in list(self.lines) if all(word in line for word in words)]

    def end(self, number: int = signal.SIGTERM, seconds: float = 60.0) -> int:
        """Send a signal and wait. Returns the exit code."""
        self.process.send_signal(number)
        return self.wait(seconds)

    def wait(self, seconds: float = 60.0) -> int:
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"{self.name} did not end:\n{self.output}") from None
        self._reader.join(2)
        return code

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    @property
    def output(self) -> str:
        return "\n".join([f"--- {self.name} ({self.process.poll()})", *self.lines])


def request(
    client: Host, address: str, path: str, body: dict[str, Any] | None = None, port: int = 8000
) -> tuple[int, str]:
    """One HTTP request from the host ``client``; status and body, of a stream the whole of it."""
    with client.entered():
        connection = http.client.HTTPConnection(address, port, timeout=60)
        connection.connect()
    try:
        if body is None:
            connection.request("GET", path)
        else:
            headers = {"content-type": "application/json"}
            connection.request("POST", path, json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def is_ready(client: Host, address: str) -> bool:
    try:
        return request(client, address, "/ready")[0] == 200
    except OSError:
        return False


def streamed_text(events: str) -> str:
    """The text of an answer that came as server-sent events."""
    data = [line.removeprefix("data: ") for line in events.splitlines() if line.startswith("data")]
    assert data[-1] == "[DONE]"
    return "".join(choice["text"] for event in data[:-1] for choice in json.loads(event)["choices"])
