"""What the pipeline itself costs: CPU per streamed token in each process, added time to the first
token, streamed tokens per second, and idle CPU. The null device stands in for the model.

    python -m penstock.loadtest.studies.pipeline_cost
    python -m penstock.loadtest.studies.pipeline_cost --requests chat tools thinking
    python -m penstock.loadtest.studies.pipeline_cost --stream sse json msgpack

Linux only (reads /proc). The client shares the machine: on few cores it is the limit of the
streamed tokens per second, and its own share is reported beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from penstock.loadtest.studies.multiplexed_streams import Encoding, multiplexed

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Says {name}",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
    for name in ("weather", "traffic", "news")
]
REQUESTS = ("text", "chat", "tools", "thinking")
"""A text completion; a chat; one with three tools; one with tools whose prompt ends in thinking."""

ROLES = ("frontend", "tokenizer", "router", "scheduler", "worker")


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process, in nanosecond steps where the kernel keeps them.

    Clock ticks (what psutil reads) charge a whole tick to whoever runs at that moment, which
    says nothing of processes that work for microseconds at a time.
    """
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
    except (OSError, IndexError):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)


class Server:
    """One `penstock serve` with the null device."""

    def __init__(self, frontends: int, step_ms: float, seqs: int) -> None:
        self.process = subprocess.Popen(
            [
                sys.executable, "-m", "penstock.services", "serve", "--device", "null",
                "--null-step-ms", str(step_ms), "--port", "0", "--frontends", str(frontends),
                "--max-num-seqs", str(seqs), "--log-level", "warning",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip
        self.url = self._wait()

    def _wait(self) -> tuple[str, int]:
        if self.process.stdout is None:
            raise RuntimeError("no output to read")
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            found = re.search(r"http://([\d.]+):(\d+)/v1", line)
            if found:
                threading.Thread(target=self.process.stdout.read, daemon=True).start()
                return found[1], int(found[2])
        raise RuntimeError("serve ended:\n" + "".join(lines))

    def cpu(self) -> dict[str, float]:
        """Seconds of CPU used so far, by role, summed over its processes."""
        used = dict.fromkeys(ROLES, 0.0)
        for child in psutil.Process(self.process.pid).children(recursive=True):
            command = " ".join(child.cmdline())
            role = next((r for r in ROLES if r in command), None)
            if role is not None:
                used[role] += cpu_seconds(child.pid)
        return used

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(30)


class Stream(asyncio.Protocol):
    """One streamed request on a raw connection; counts events without parsing them."""

    def __init__(self, path: str, body: bytes, done: asyncio.Future[None]) -> None:
        self.first: float | None = None
        self.events = 0
        self._request = (
            b"POST %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
            % (path.encode(), len(body), body)
        )
        self._done = done
        self.sent = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.Transport):
            self.sent = time.perf_counter()
            transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        count = data.count(b"data: {")
        if count and self.first is None:
            self.first = time.perf_counter()
        self.events += count

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_result(None)


def request(kind: str, prompt: str) -> tuple[str, dict[str, Any]]:
    """Path and body of a request of one of ``REQUESTS``."""
    if kind == "text":
        return "/v1/completions", {"prompt": prompt}
    messages = [{"role": "user", "content": prompt}]
    body: dict[str, Any] = {"messages": messages}
    if kind != "chat":
        body["tools"] = TOOLS
    if kind == "thinking":
        messages.append({"role": "assistant", "content": "<think>\nLet me see."})
        body |= {"add_generation_prompt": False, "continue_final_message": True}
    return "/v1/chat/completions", body


async def stream(address: tuple[str, int], prompt: str, tokens: int, kind: str = "text") -> Stream:
    loop = asyncio.get_running_loop()
    path, asked = request(kind, prompt)
    body = json.dumps({**asked, "max_tokens": tokens, "stream": True, "ignore_eos": True}).encode()
    done: asyncio.Future[None] = loop.create_future()
    _, protocol = await loop.create_connection(lambda: Stream(path, body, done), *address)
    await done
    return protocol


class Sent(NamedTuple):
    """How answers are sent."""

    encoding: Encoding | None = None
    """On WebSockets of /v1/stream; ``None``: as server-sent events."""
    per_connection: int = 1

    @property
    def name(self) -> str:
        return "sse" if self.encoding is None else f"{self.encoding} x{self.per_connection}"


async def many(
    address: tuple[str, int], streams: int, tokens: int, kind: str, sent: Sent
) -> tuple[int, float]:
    """``streams`` requests at once; returns (events, seconds)."""
    began = time.perf_counter()
    prompts = [f"stream number {n}" for n in range(streams)]
    if sent.encoding is None:
        done = await asyncio.gather(*(stream(address, one, tokens, kind) for one in prompts))
        return sum(s.events for s in done), time.perf_counter() - began
    kind_of_frame = "completion" if kind == "text" else "chat"
    more = {"max_tokens": tokens, "ignore_eos": True}
    frames = [
        {"id": str(number), "type": kind_of_frame, "body": {**request(kind, prompt)[1], **more}}
        for number, prompt in enumerate(prompts)
    ]
    events = await multiplexed(address, frames, sent.encoding, sent.per_connection)
    return events, time.perf_counter() - began


async def first_tokens(address: tuple[str, int], count: int) -> list[float]:
    """Milliseconds to the first token, one request at a time."""
    found = []
    for _ in range(count):
        one = await stream(address, "Hello, how are you today?", 1)
        if one.first is not None:
            found.append((one.first - one.sent) * 1000)
    return found


def percent(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def measure(
    frontends: int,
    streams: int,
    tokens: int,
    step_ms: float,
    idle_seconds: float,
    kind: str,
    sent: Sent,
) -> dict[str, Any]:
    """One server, one run. CPU figures are µs a streamed token."""
    server = Server(frontends, step_ms, max(streams, 64))
    try:
        asyncio.run(many(server.url, 8, 32, kind, sent))
        asyncio.run(first_tokens(server.url, 20))
        waits = asyncio.run(first_tokens(server.url, 200)) if step_ms == 0 else []
        time.sleep(1.0)
        idle_before = server.cpu()
        time.sleep(idle_seconds)
        idle_after = server.cpu()
        before, own_before = server.cpu(), time.process_time()
        events, seconds = asyncio.run(many(server.url, streams, tokens, kind, sent))
        own = time.process_time() - own_before
        after = server.cpu()
        total = streams * tokens
    finally:
        server.stop()
    return {
        "requests": kind,
        "stream": sent.name,
        "frontends": frontends,
        "streams": streams,
        "step_ms": step_ms,
        "tokens": total,
        "events": events,
        "tokens_per_s": round(total / seconds),
        "client_cpu_share": round(own / seconds, 2),
        "cpu_us_per_token": {r: round((after[r] - before[r]) / total * 1e6, 2) for r in ROLES},
        "idle_percent": {
            r: round((idle_after[r] - idle_before[r]) / idle_seconds * 100, 2) for r in ROLES
        },
        "ttft_ms": {
            "median": round(statistics.median(waits), 2),
            "p99": round(percent(waits, 0.99), 2),
        }
        if waits
        else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=800)
    parser.add_argument("--step-ms", type=float, nargs="+", default=[5.0, 0.0])
    parser.add_argument("--frontends", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--requests", choices=REQUESTS, nargs="+", default=["text"])
    parser.add_argument("--idle-seconds", type=float, default=5.0)
    parser.add_argument("--stream", choices=("sse", "json", "msgpack"), nargs="+", default=["sse"])
    parser.add_argument(
        "--per-connection", type=int, nargs="+", default=[1, 64], help="requests on a WebSocket"
    )
    options = parser.parse_args()
    ways: list[Sent] = []
    for way in options.stream:
        ways += [Sent()] if way == "sse" else [Sent(way, one) for one in options.per_connection]
    cases = itertools.product(options.requests, options.step_ms, options.frontends, ways)
    for kind, step_ms, frontends, sent in cases:
        found = measure(
            frontends, options.streams, options.tokens, step_ms, options.idle_seconds, kind, sent
        )
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
