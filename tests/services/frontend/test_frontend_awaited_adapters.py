"""Requests for an adapter that is being loaded wait, within limits."""

from __future__ import annotations

import asyncio

import pytest

from penstock.services.frontend.awaited_adapters import AwaitedAdapters
from penstock.services.frontend.errors import ApiError


def test_a_request_waits_until_the_adapter_is_loaded_and_no_longer() -> None:
    async def run() -> None:
        awaited, loaded = AwaitedAdapters(), asyncio.Event()

        async def load() -> None:
            async with awaited.loading("mill"):
                await loaded.wait()

        loading = asyncio.create_task(load())
        await asyncio.sleep(0)
        waiting = asyncio.create_task(awaited.wait("mill"))
        await asyncio.sleep(0)
        await awaited.wait("other")  # at once
        assert "mill" in awaited and awaited.waiting == 1 and not waiting.done()
        loaded.set()
        await asyncio.gather(loading, waiting)
        assert "mill" not in awaited and awaited.waiting == 0

    asyncio.run(run())


def test_too_many_requests_and_too_long_waits_are_refused() -> None:
    async def run() -> None:
        awaited = AwaitedAdapters(wait_s=0.001, max_waiting=1)
        async with awaited.loading("mill"):
            first = asyncio.create_task(awaited.wait("mill"))
            await asyncio.sleep(0)
            with pytest.raises(ApiError, match="as many as may"):
                await awaited.wait("mill")
            with pytest.raises(ApiError, match="not there within") as refused:
                await first
        assert refused.value.status == 503 and awaited.waiting == 0

    asyncio.run(run())
