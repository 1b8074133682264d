"""Each request that has ended leaves one line: what it was, never what it said."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from support.frontend.frontend_scripted import LENGTH, Client, Script, forever, rejected, run, say

from penstock.client.sink import RowExtras, Sink
from penstock.protocol.config.server_fields import ServerConfig
from penstock.protocol.process import logs
from penstock.protocol.wire.messages.requests import Work
from penstock.protocol.wire.messages.tokens import End, EndReason, Reasoning, RowStart

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SECRET = "a secret that nobody may read"
Captured = pytest.CaptureFixture[str]
Use = Callable[[Client], Awaitable[None]]


def lines_of(
    capfd: Captured,
    use: Use,
    script: Script | None = None,
    config: ServerConfig | None = None,
    level: str = "info",
) -> list[dict[str, Any]]:
    """What a server logs of the requests that ``use`` makes. Native code of other tests may write
    lines of its own to the same descriptor."""
    logs.set_up("frontend", level, "json")
    capfd.readouterr()
    run(use, script, config)
    logs.flush()
    text = capfd.readouterr().err
    assert SECRET not in text
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return [line for line in found if line["event"] == "request"]


def post(path: str, body: dict[str, Any], **kwargs: Any) -> Use:
    async def use(client: Client) -> None:
        if body.get("stream"):
            await client.events(path, body)
        else:
            await client.post(path, body, **kwargs)

    return use


def test_the_line_of_a_request_counts_its_thinking(capfd: Captured) -> None:
    async def script(work: Work, sink: Sink) -> None:
        sink.on_accepted(7)
        sink.on_row(0, "", 2, RowExtras(events=[Reasoning(SECRET)]))
        sink.on_row(0, SECRET, 1, RowExtras(end=End(0, EndReason.STOP, reasoning_tokens=2)))

    body = {"messages": [{"role": "user", "content": SECRET}]}
    (line,) = lines_of(capfd, post(CHAT, body), script)
    assert (line["output_tokens"], line["thinking_tokens"]) == (3, 2)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answered_request_has_a_line_with_its_sizes_times_and_finish(
    capfd: Captured, stream: bool
) -> None:
    async def script(work: Work, sink: Sink) -> None:
        sink.on_accepted(7)
        for index, end in enumerate((None, None, LENGTH)):
            await asyncio.sleep(0.02)
            start = RowStart(0, 4, 0.02) if index == 0 else None
            sink.on_row(0, SECRET, 1, RowExtras(start, end))

    body = {"messages": [{"role": "user", "content": SECRET}], "stream": stream}
    (line,) = lines_of(capfd, post(CHAT, body), script)
    assert (line["level"], line["service"], line["status"]) == ("info", "frontend", 200)
    assert line["route"] == CHAT
    assert line["id"].startswith("req-")
    assert (line["prompt_tokens"], line["cached_tokens"], line["output_tokens"]) == (7, 4, 3)
    assert line["finish"] == "length"
    assert line["queue_ms"] == 20
    assert 20 <= line["first_token_ms"] <= line["total_ms"] - 40
    assert line["prefill_ms"] == pytest.approx(line["first_token_ms"] - 20, abs=0.11)
    assert line["decode_ms"] >= 40
    assert line["total_ms"] == pytest.approx(
        line["queue_ms"] + line["prefill_ms"] + line["decode_ms"], abs=0.31
    )
    assert "continuations" not in line
    assert 0 < line["tokens_per_s"] <= 50.5
    assert line["timestamp"].endswith("Z")


def test_the_line_of_a_request_names_its_trace(capfd: Captured) -> None:
    trace = "4BF92f3577b34da6a3ce929d0e0e4736"
    headers = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
    (line,) = lines_of(capfd, post(TEXT, {"prompt": "x"}, headers=headers))
    assert line["trace"] == trace.lower()
    (line,) = lines_of(capfd, post(TEXT, {"prompt": "x"}))
    assert "trace" not in line


def test_the_line_of_a_request_counts_the_losses_that_it_survived(capfd: Captured) -> None:
    async def script(work: Work, sink: Sink) -> None:
        sink.on_accepted(2)
        sink.on_continued()
        sink.on_row(0, "x", 1)
        sink.on_continued()
        sink.on_row(0, "x", 1, RowExtras(end=LENGTH))

    (line,) = lines_of(capfd, post(TEXT, {"prompt": SECRET}), script)
    assert (line["continuations"], line["finish"]) == (2, "length")


def test_several_choices_are_one_line(capfd: Captured) -> None:
    async def script(work: Work, sink: Sink) -> None:
        sink.on_accepted(2)
        sink.on_row(0, "x", 1, RowExtras(end=LENGTH))
        sink.on_row(1, "x", 1, RowExtras(end=End(0, EndReason.STOP)))

    (line,) = lines_of(capfd, post(TEXT, {"prompt": SECRET, "n": 2}), script)
    assert line["finish"] == "length,stop"
    assert line["output_tokens"] == 2


def test_the_clients_request_id_names_the_line(capfd: Captured) -> None:
    use = post(TEXT, {"prompt": "x"}, headers={"x-request-id": "mine-7"})
    (line,) = lines_of(capfd, use, say("a"))
    assert line["id"] == "mine-7"


@pytest.mark.parametrize(
    ("path", "body", "status", "error"),
    [
        (TEXT, {"prompt": SECRET, "temperature": SECRET}, 400, "invalid_request_error"),
        (TEXT, {"prompt": "x", SECRET: 1}, 400, "unknown_parameter"),
        (TEXT, {"prompt": "x", "model": SECRET}, 404, "model_not_found"),
        (f"/{SECRET.replace(' ', '-')}", {}, 404, "not_found_error"),
    ],
)
def test_a_refused_request_has_a_line_at_warning_that_repeats_nothing_of_it(
    capfd: Captured, path: str, body: dict[str, Any], status: int, error: str
) -> None:
    (line,) = lines_of(capfd, post(path, body), level="warning")
    assert (line["level"], line["status"], line["error"]) == ("warning", status, error)
    assert "secret" not in json.dumps(line)


def test_a_request_that_the_pipeline_refuses_has_a_line_at_warning(capfd: Captured) -> None:
    async def script(work: Work, sink: Sink) -> None:
        sink.on_rejected(rejected(503, SECRET, kind="overloaded_error"))

    (line,) = lines_of(capfd, post(TEXT, {"prompt": "x"}), script, level="warning")
    assert (line["status"], line["error"]) == (503, "overloaded_error")
    assert line["finish"] == "rejected"


def test_a_stream_that_ends_with_an_error_has_a_line_at_warning(capfd: Captured) -> None:
    async def script(work: Work, sink: Sink) -> None:
        sink.on_accepted(1)
        sink.on_row(0, "a", 1)
        await asyncio.sleep(0.05)
        end = End(0, EndReason.ERROR, message=SECRET, status=500)
        sink.on_row(0, "", 0, RowExtras(end=end))

    body = {"prompt": "x", "stream": True}
    (line,) = lines_of(capfd, post(TEXT, body), script, level="warning")
    assert (line["status"], line["error"], line["finish"]) == (200, "server_error", "error")
    assert line["output_tokens"] == 1


def test_a_client_that_leaves_has_a_line_that_says_so(capfd: Captured) -> None:
    async def use(client: Client) -> None:
        asking = asyncio.ensure_future(client.post(TEXT, {"prompt": "x"}))
        while not client.gateway.works:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)  # it says something
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError, aiohttp.ClientError):
            await asking
        await client.gateway.cancel_seen.wait()
        await asyncio.sleep(0.05)

    (line,) = lines_of(capfd, use, forever)
    assert (line["status"], line["finish"], line["level"]) == (499, "abort", "info")
    assert line["output_tokens"] > 0


def test_what_is_no_http_and_what_has_no_key_have_a_line(capfd: Captured) -> None:
    async def use(client: Client) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(f"GET {SECRET} {SECRET}\r\n\r\n".encode())
        await reader.read()
        writer.close()
        await client.get("/v1/models")

    config = ServerConfig(api_key=["a-key-of-enough-length"])
    first, second = lines_of(capfd, use, config=config, level="warning")
    assert (first["status"], first["route"], first["error"]) == (400, "other", "malformed_http")
    assert (second["status"], second["route"]) == (401, "/v1/models")


def test_probes_pages_and_lists_leave_no_line(capfd: Captured) -> None:
    async def use(client: Client) -> None:
        for path in ("/live", "/ready", "/health", "/", "/v1/models", "/metrics", "/version"):
            await client.get(path)
        client.gateway.is_draining = True
        status, _, _ = await client.get("/ready")
        assert status == 503

    assert lines_of(capfd, use) == []
