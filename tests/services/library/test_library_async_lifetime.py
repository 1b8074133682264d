"""How the processes of an ``AsyncLLM`` start and end, also where nobody ends them."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
import uvloop
from support.library.async_clients import GREEDY, LONG, prompt, rest_of, server_of

from penstock import AsyncLLM, ServerFailed


def test_what_runs_when_the_processes_end_is_told_so() -> None:
    async def use() -> None:
        async with AsyncLLM(device="null", null_step_ms=20) as llm:
            generator = llm.generate(prompt(1), LONG)
            await anext(generator)
            server_of(llm).kill()
            with pytest.raises(ServerFailed, match="the server has ended"):
                await rest_of(generator)
        with pytest.raises(RuntimeError, match="closed"):
            await llm.start()

    asyncio.run(asyncio.wait_for(use(), 100))


def test_closing_during_the_start_ends_it_and_who_waits_for_it() -> None:
    async def use() -> None:
        llm = AsyncLLM(device="cpu")
        asked = asyncio.create_task(rest_of(llm.generate(prompt(1), GREEDY)))
        while llm._processes.server is None:
            await asyncio.sleep(0.01)
        process = server_of(llm)
        await llm.close()
        assert process.poll() is not None
        with pytest.raises(ServerFailed, match="closed"):
            await asked
        await llm.close()

    asyncio.run(asyncio.wait_for(use(), 100))


def test_a_program_that_closes_nothing_leaves_nothing() -> None:
    """Its event loop has ended by then; another one cannot use the processes, but close them."""
    llms = [AsyncLLM(device="null")]
    uvloop.run(rest_of(llms[0].generate(prompt(1), GREEDY)))
    with pytest.raises(RuntimeError, match="another event loop"):
        asyncio.run(llms[0].start())
    process = server_of(llms[0])
    llms.clear()
    gc.collect()
    process.wait(60)


def test_a_program_may_be_cancelled_during_the_start() -> None:
    llm = AsyncLLM(device="cpu")

    async def use() -> None:
        starting = asyncio.create_task(llm.start())
        while llm._processes.server is None:
            await asyncio.sleep(0.01)
        processes.append(server_of(llm))
        assert llm._starting is not None
        llm._starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    processes: list[Any] = []
    asyncio.run(asyncio.wait_for(use(), 100))
    processes[0].wait(60)
