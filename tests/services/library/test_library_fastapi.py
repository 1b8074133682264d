"""The application on docs/library.md, as it stands there, behind a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import psutil
import pytest
from support.library.async_clients import SETTINGS, open_requests, workers_of
from support.library.joined import joining

import penstock
from penstock import LLM, AsyncLLM

pytest.importorskip("fastapi")
uvicorn = pytest.importorskip("uvicorn")

PAGE = Path(__file__).resolve().parents[3] / "docs/library.md"
SUM = {"question": "What is 17 + 25?"}
LONG = {"question": "Tell me a long story about a river"}
"""Its answer has 84 tokens."""


def application(llm: LLM) -> Any:
    """The example's, whose model has the processes of ``llm``."""

    def asked(**settings: Any) -> AsyncLLM:
        assert settings.items() <= SETTINGS.items()
        return AsyncLLM(**SETTINGS)

    (example,) = re.findall(r"```python\n([^`]*FastAPI\([^`]*)```", PAGE.read_text())
    names: dict[str, Any] = {}
    with mock.patch.object(penstock, "AsyncLLM", asked):
        exec(example, names)
    return names["app"]


@contextlib.asynccontextmanager
async def serving(llm: LLM) -> AsyncIterator[tuple[Any, httpx.AsyncClient]]:
    """The application, and a client of it."""
    app = application(llm)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    with joining(llm), socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        running = asyncio.create_task(server.serve(sockets=[listener]))
        async with httpx.AsyncClient(base_url=url, timeout=100, trust_env=False) as client:
            yield app, client
        server.should_exit = True
        await running


@contextlib.contextmanager
def suspended(processes: list[psutil.Process]) -> Iterator[None]:
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


async def left_in_the_middle(app: Any, client: httpx.AsyncClient) -> bool:
    """Whether a request was given up whose client has left before it could end."""
    async with client.stream("GET", "/answer", params=LONG) as response:
        first = await anext(response.aiter_text())
        assert (response.status_code, bool(first)) == (200, True)
        with suspended(workers_of(app.state.llm)):  # nothing but the client ends it now
            if not open_requests(app.state.llm):
                return False  # too late
            await response.aclose()
            while open_requests(app.state.llm):
                await asyncio.sleep(0.01)
    return True


def test_the_application_on_the_page_streams_and_a_client_that_leaves_ends_its_request(
    llm: LLM,
) -> None:
    async def use() -> None:
        async with serving(llm) as (app, client):
            answers = await asyncio.gather(*(client.get("/answer", params=SUM) for _ in range(3)))
            assert [(one.status_code, one.text.strip()) for one in answers] == [(200, "42")] * 3
            refused = await client.get("/answer", params={**SUM, "max_tokens": -1})
            assert (refused.status_code, "max_tokens is -1" in refused.text) == (400, True)
            while not await left_in_the_middle(app, client):
                pass
            again = await client.get("/answer", params=SUM)
            assert again.text.strip() == "42"

    asyncio.run(asyncio.wait_for(use(), 100))
