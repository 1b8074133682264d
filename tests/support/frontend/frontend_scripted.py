"""A real HTTP server on a real socket, over a gateway that plays a script."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from penstock.client.gateway_interface import Overloaded, Readiness, ServedModel
from penstock.client.sink import RowExtras, Sink
from penstock.protocol.config.server_fields import ServerConfig
from penstock.protocol.logprobs import NamedLogprobs
from penstock.protocol.process.metrics import Registry
from penstock.protocol.tasks import CLASSIFY, DETOKENIZE, EMBED, SCORE, TOKENIZE
from penstock.protocol.wire.messages.membership import MetricsAnswer, Peer, ProcessMetrics
from penstock.protocol.wire.messages.requests import Rejected, Work
from penstock.protocol.wire.messages.tokens import (
    End,
    EndReason,
    Event,
    RowDetails,
    RowStart,
    Scores,
    Text,
    TokenIds,
    Vector,
)
from penstock.services.frontend.app import make_app, start
from penstock.services.frontend.connection import ConnectionLimits
from penstock.services.frontend.dialects.interface import Dialect
from penstock.services.frontend.dialects.registry import BUILT_IN

Script = Callable[[Work, Sink], Coroutine[Any, Any, None]]

STOP = End(0, EndReason.STOP)
LENGTH = End(0, EndReason.LENGTH)
JSON = {"Content-Type": "application/json"}
VOCAB_SIZE = 1000
MAX_MODEL_LEN = 64


def rejected(status: int, message: str = "no", **fields: Any) -> Rejected:
    kind = fields.pop("kind", "invalid_request_error")
    return Rejected(0, 0, status, kind, message, **fields)


def say(*texts: str, end: End = STOP, prompt_tokens: int = 3, cached: int = 0) -> Script:
    """Accept, then every choice says the texts, one token each, and ends with the last one."""

    async def script(work: Work, sink: Sink) -> None:
        sink.on_accepted(prompt_tokens)
        for index, text in enumerate(texts):
            await asyncio.sleep(0)
            for choice in work.choices:
                last = end if index == len(texts) - 1 else None
                start = RowStart(0, cached, 0.01) if index == 0 else None
                extras = RowExtras(start, last) if start or last else None
                sink.on_row(choice.choice, text, 1, extras)

    return script


def of_any_task(generate: Script) -> Script:
    """The tokenizer's tasks are answered as it does: ids 1, 2, 3, or a text; those of folders with
    numbers; others by ``generate``."""
    numbers = array("f", [0.5, 0.25])
    events: dict[str, Event] = {
        TOKENIZE: TokenIds(array("i", [1, 2, 3]).tobytes()),
        DETOKENIZE: Text("one two three"),
        EMBED: Vector(numbers.tobytes()),
        SCORE: Scores(numbers[:1].tobytes()),
        CLASSIFY: Scores(numbers.tobytes()),
    }

    async def script(work: Work, sink: Sink) -> None:
        event = events.get(work.head.task)
        if event is None:
            await generate(work, sink)
            return
        sink.on_accepted(3)
        for choice in work.choices:
            sink.on_row(choice.choice, "", 0, RowExtras(end=STOP, events=[event]))

    return script


async def forever(work: Work, sink: Sink) -> None:
    """Accept, and talk until cancelled."""
    sink.on_accepted(1)
    while True:
        sink.on_row(0, "x", 1)
        await asyncio.sleep(0.005)


async def waiting(work: Work, sink: Sink) -> None:
    """Never even accept."""
    await asyncio.sleep(60)


def logprobs_of_a_token(most: int) -> RowDetails:
    """A token with so many likeliest ones beside it."""
    entry = struct.pack(f"<iif{most}i{most}f", 1, 1, -0.5, *range(most), *[-1.25] * most)
    return RowDetails(0, NamedLogprobs(most, entry, [b" token"] * (1 + most), [0]))


class ScriptedGateway:
    """Plays ``script`` for every request; notes what was opened and cancelled."""

    def __init__(self, script: Script | None = None) -> None:
        self.script = script or say("Hello", " world")
        self.works: list[Work] = []
        self.cancelled: list[int] = []
        self.cancel_seen = asyncio.Event()
        self.overloaded: Rejected | None = None
        self.served = [ServedModel("org/model", ["alias"], MAX_MODEL_LEN, VOCAB_SIZE)]
        self.readiness = Readiness(True, {"engine": "ready"})
        self.is_draining = self.is_closed = False
        self.peers: list[Peer] = []
        self.others_answer: list[Callable[[str, bytes], bytes]] = []
        """What other frontends say to a question."""
        self.launcher_answer: Callable[[str, bytes], bytes] | None = None
        """What the launcher says to one."""
        self.engines_answer: list[Callable[[str, bytes], bytes]] = []
        """What schedulers say to one."""
        self.registry = Registry()
        self.others: list[ProcessMetrics] = []
        self.failures: list[BaseException] = []
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def open(self, work: Work, sink: Sink) -> int:
        if self.overloaded is not None:
            raise Overloaded(self.overloaded)
        self.works.append(work)
        request_id = len(self.works)
        task = asyncio.get_running_loop().create_task(self.script(work, sink))
        task.add_done_callback(self._done)
        self._tasks[request_id] = task
        return request_id

    def _done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failures.append(error)

    async def known(self, name: str = "") -> None:
        """It knows from the start."""

    def cancel(self, request_id: int) -> None:
        self.cancelled.append(request_id)
        self.cancel_seen.set()
        self._tasks[request_id].cancel()

    def models(self) -> list[ServedModel]:
        return self.served

    def ready(self, name: str = "") -> Readiness:
        return self.readiness

    async def metrics(self) -> MetricsAnswer:
        own = ProcessMetrics("frontend", 1, self.registry.report())
        return MetricsAnswer([own, *self.others])

    async def ask(self, service: str, what: str, about: bytes) -> list[bytes]:
        asked = [one for one in self.others_answer if service in ("", "frontend")]
        if service == "launcher" and self.launcher_answer is not None:
            asked = [self.launcher_answer]
        if service == "scheduler":
            asked = self.engines_answer
        return [found for one in asked if (found := one(what, about))]

    def members(self) -> list[Peer]:
        return self.peers

    def draining(self) -> bool:
        return self.is_draining


class Client:
    """A client of one server."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        port: int,
        gateway: ScriptedGateway,
        app: web.Application,
    ) -> None:
        self.session = session
        self.app = app
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.gateway = gateway

    async def post(
        self, path: str, body: Any, **kwargs: Any
    ) -> tuple[int, dict[str, Any], aiohttp.ClientResponse]:
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
        async with self.session.post(self.url + path, data=body, **kwargs) as response:
            return response.status, json.loads(await response.read()), response

    async def get(self, path: str, **kwargs: Any) -> tuple[int, Any, aiohttp.ClientResponse]:
        async with self.session.get(self.url + path, **kwargs) as response:
            raw = await response.read()
            is_json = response.content_type == "application/json"
            return response.status, json.loads(raw) if is_json else raw, response

    async def counted(self, route: str) -> dict[str, int]:
        """The route's answers that ``/metrics`` tells of, by their status."""
        _, text, _ = await self.get("/metrics")
        begin = f'penstock_http_requests_total{{route="{route}",status="'
        lines = [line for line in text.decode().splitlines() if line.startswith(begin)]
        found = (line.removeprefix(begin).split('"} ') for line in lines)
        return {status: int(float(count)) for status, count in found}

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """All ``data:`` events of a stream: decoded JSON, or the text that is none."""
        data = json.dumps({**body, "stream": True}).encode()
        async with self.session.post(self.url + path, data=data) as response:
            raw = await response.read()
            assert response.status == 200, raw
            assert response.content_type == "text/event-stream"
            return parse_events(raw)


def parse_events(raw: bytes) -> list[Any]:
    """A strict reader of the event stream format, for the parts of it that are used here."""
    assert raw.endswith(b"\n\n")
    events: list[Any] = []
    for block in raw.decode().removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            continue
        assert block.startswith("data: "), block
        assert "\n" not in block
        text = block.removeprefix("data: ")
        events.append(text if text == "[DONE]" else json.loads(text))
    return events


@asynccontextmanager
async def serving(
    gateway: ScriptedGateway,
    config: ServerConfig | None = None,
    *,
    stall_s: float = 60.0,
    limits: ConnectionLimits | None = None,
    dialects: Sequence[Dialect] = BUILT_IN,
) -> AsyncIterator[Client]:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    app = make_app(config or ServerConfig(), gateway, gateway.registry, dialects, stall_s=stall_s)
    runner = await start(app, sock, limits)
    try:
        timeout = aiohttp.ClientTimeout(total=60)
        async with aiohttp.ClientSession(timeout=timeout, headers=JSON) as session:
            yield Client(session, port, gateway, app)
    finally:
        await runner.cleanup()
    assert gateway.failures == []


def run(
    use: Callable[[Client], Awaitable[None]],
    script: Script | None = None,
    config: ServerConfig | None = None,
    *,
    stall_s: float = 60.0,
) -> ScriptedGateway:
    """Start a server, use it, stop it; returns its gateway."""

    async def main() -> ScriptedGateway:
        gateway = ScriptedGateway(script)
        async with serving(gateway, config, stall_s=stall_s) as client:
            async with asyncio.timeout(60):
                await use(client)
        return gateway

    return asyncio.run(main())
