"""An OpenAI-compatible server with known delays, to check the load generator against.

Written on aiohttp's server and the standard json module, with nothing of ours: an independent
measure. The model's name chooses the behaviour, see ``BEHAVIOURS``. ``GET /seen`` tells what came
in and when each chunk was really sent (CLOCK_MONOTONIC, which a client on this machine shares).

    python mock_openai.py --ttft-ms 60 --itl-ms 20      prints its port
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from typing import Any

from aiohttp import web

BEHAVIOURS = {
    "plain": "one chunk a token",
    "serial": "one request at a time, in the order of their arrival",
    "remembers": "usage counts as cached what an earlier prompt began with",
    "early-role": "an empty chunk with the role, at once",
    "pairs": "two tokens in each chunk",
    "empty-text": "every second chunk has no text; usage counts it",
    "no-usage": "stream_options are ignored",
    "continuous-usage": "usage in every chunk",
    "no-text": "one chunk with a finish_reason and an empty text",
    "busy": "429 to all",
    "every-third": "500 to every third request",
    "error-event": "an error event after two chunks",
    "truncated": "a proper end of the response after two chunks, without finish_reason",
    "dropped": "the connection is closed after two chunks",
    "hanging": "nothing after two chunks",
    "silent": "no answer at all",
    "not-a-stream": "a JSON body",
    "garbage": "an event that is no JSON",
    "bad-framing": "bytes that are no HTTP",
    "closing": "Connection: close",
}


class Mock:
    def __init__(self, ttft: float, itl: float, key: str | None) -> None:
        self.ttft, self.itl, self.key = ttft, itl, key
        self.seen: list[dict[str, Any]] = []
        self.connections: set[int] = set()
        self.counts: Counter[str] = Counter()
        self.free_at = 0.0
        self.prompts: list[list[int]] = []

    async def models(self, request: web.Request) -> web.Response:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "who are you?"}}, status=401)
        names = () if request.headers.get("X-Models") == "none" else BEHAVIOURS
        cards = [{"id": name, "object": "model", "max_model_len": 4096} for name in names]
        return web.json_response({"object": "list", "data": cards})

    async def tell(self, request: web.Request) -> web.Response:
        seen, self.seen = self.seen, []
        return web.json_response({"seen": seen, "connections": len(self.connections)})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        arrived = time.perf_counter()
        body = await request.json()
        record: dict[str, Any] = {
            "arrived": arrived,
            "path": request.path,
            "headers": dict(request.headers),
            "body": body,
            "sent": [],
        }
        self.seen.append(record)
        self.connections.add(id(request.transport))
        kind = body["model"]
        self.counts[kind] += 1
        if kind == "busy" or (kind == "every-third" and self.counts[kind] % 3 == 0):
            status = 429 if kind == "busy" else 500
            message = f"no more of request {self.counts[kind] % 5}"
            return web.json_response({"error": {"message": message}}, status=status)
        if kind == "silent":
            await asyncio.sleep(3600)
        if kind == "not-a-stream":
            return web.json_response({"choices": []})
        if kind == "bad-framing":
            assert request.transport is not None
            request.transport.write(b"SMTP ready\r\n\r\n")
            await asyncio.sleep(0.05)
            request.transport.abort()
        return await self.stream(request, body, kind, record)

    def begins(self, kind: str, arrived: float, tokens: int) -> float:
        """When the work on a request starts."""
        if kind != "serial":
            return arrived
        begins = max(arrived, self.free_at)
        self.free_at = begins + self.ttft + (tokens - 1) * self.itl
        return begins

    def cached(self, prompt: list[int]) -> int:
        """Tokens at the beginning that an earlier prompt had there, too."""
        most = 0
        for earlier in self.prompts:
            pairs = zip(prompt, earlier, strict=False)
            most = max(most, next((n for n, (a, b) in enumerate(pairs) if a != b), len(earlier)))
        self.prompts.append(prompt)
        return min(most, len(prompt))

    async def stream(
        self, request: web.Request, body: dict[str, Any], kind: str, record: dict[str, Any]
    ) -> web.StreamResponse:
        chat = "chat" in request.path
        tokens = body.get("max_tokens") or body.get("max_completion_tokens") or 16
        prompt = body.get("prompt") or body["messages"][0]["content"]
        usage: dict[str, Any] = {
            "prompt_tokens": len(prompt) if isinstance(prompt, list) else len(prompt.split()),
            "completion_tokens": tokens,
        }
        if kind == "remembers":
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached(prompt)}
        begins = self.begins(kind, record["arrived"], tokens)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if kind == "closing":
            response.force_close()
        await response.prepare(request)

        async def event(value: Any) -> None:
            await response.write(b"data: " + json.dumps(value).encode() + b"\n\n")

        def chunk(text: str, finish: str | None) -> dict[str, Any]:
            part: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
            if body.get("return_token_ids"):
                part["token_ids"] = [900 + len(text)]
            made = {"choices": [{"index": 0, **part, "finish_reason": finish}]}
            return made | ({"usage": usage} if kind == "continuous-usage" else {})

        if kind == "early-role":
            await event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        step = 2 if kind == "pairs" else 1
        total = 1 if kind == "no-text" else tokens // step
        for number in range(total):
            due = begins + self.ttft + number * self.itl
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            if number == 2 and kind == "error-event":
                await event({"error": {"message": "the engine is gone", "code": 500}})
                return response
            if number == 2 and kind == "garbage":
                await response.write(b"data: {not json\n\n")
            if number == 2 and kind == "truncated":
                return response
            if number == 2 and kind == "dropped":
                assert request.transport is not None
                request.transport.abort()
            if number == 2 and kind == "hanging":
                await asyncio.sleep(3600)
            empty = kind == "no-text" or (kind == "empty-text" and number % 2 == 1)
            record["sent"].append(time.perf_counter())
            await event(
                chunk("" if empty else f"w{number} ", "length" if number == total - 1 else None)
            )
        if kind != "no-usage" and body.get("stream_options", {}).get("include_usage"):
            await event({"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response


async def serve(mock: Mock) -> None:
    app = web.Application(client_max_size=2**26)
    app.router.add_get("/v1/models", mock.models)
    app.router.add_get("/seen", mock.tell)
    app.router.add_post("/v1/completions", mock.answer)
    app.router.add_post("/v1/chat/completions", mock.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    # The test's end closes standard input: no mock outlives it.
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ttft-ms", type=float, default=0.0)
    parser.add_argument("--itl-ms", type=float, default=0.0)
    parser.add_argument("--key")
    options = parser.parse_args()
    asyncio.run(serve(Mock(options.ttft_ms / 1e3, options.itl_ms / 1e3, options.key)))


if __name__ == "__main__":
    main()
