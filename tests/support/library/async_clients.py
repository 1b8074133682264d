"""What tests of the library's asynchronous clients share."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterable
from typing import Any

import psutil
from support.library.joined import joining

from penstock import LLM, AsyncLLM, RequestOutput, SamplingParams
from penstock.services.library.results import OutputKind

SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "threads": 1,
    "max_num_seqs": 16,
}
LONG = SamplingParams(max_tokens=1500, ignore_eos=True)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def server_of(llm: AsyncLLM) -> Any:
    assert llm._processes.server is not None
    return llm._processes.server.process


def open_requests(llm: AsyncLLM) -> dict[int, Any]:
    assert llm._processes.client is not None
    return llm._processes.client.ledger.open


def workers_of(llm: AsyncLLM) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(server_of(llm).pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "worker" in " ".join(process.cmdline()):
                found.append(process)
    return found


async def rest_of(generator: AsyncIterator[RequestOutput]) -> None:
    async for _ in generator:
        pass


def prompt(number: int) -> list[int]:
    return [5 + number % 400, 6, 7]


class Program:
    """An asyncio program with an ``AsyncLLM``, of which tests run parts."""

    def __init__(self, owner: LLM | None = None, *, part_seconds: float = 100.0) -> None:
        """owner: of the processes that it joins; ``None``: it starts its own. part_seconds: within
        which a part must have ended."""
        self.runner = asyncio.Runner()
        self.llm = AsyncLLM(**SETTINGS)
        self._part_seconds = part_seconds
        with joining(owner) if owner is not None else contextlib.nullcontext():
            self.runner.run(self.llm.start())

    def run(self, part: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(asyncio.wait_for(part, self._part_seconds))

    def run_all(self, parts: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
        """At once: a step of the model takes hardly longer with several requests."""

        async def gathered() -> list[Any]:
            return await asyncio.gather(*parts)

        return list(self.run(gathered()))

    def close(self) -> None:
        self.runner.run(self.llm.close())
        self.runner.close()


async def outputs(llm: AsyncLLM, number: int, kind: OutputKind) -> list[RequestOutput]:
    found = llm.generate(prompt(number), GREEDY, output_kind=kind)
    return [output async for output in found]


def aborted_and_killed(
    program: Program, count: int, kills: list[float], looked_at: Iterable[int]
) -> None:
    """Run so many generators at once, a third of which are aborted at random moments, while the
    workers are killed; every one ends once, with the right text.

    kills: the shares of the requests that have ended by then. looked_at: the numbers of those
    whose text is compared with that of an undisturbed request.
    """
    llm, rng = program.llm, random.Random(1)
    aborted = {number for number in range(count) if rng.random() < 1 / 3}
    last: dict[int, RequestOutput] = {}
    finished: Counter[int] = Counter()

    async def one(number: int) -> None:
        stops_at = rng.randrange(1, 20)
        async for output in llm.generate(prompt(number), GREEDY, f"request {number}"):
            last[number] = output
            finished[number] += output.finished
            if number in aborted and len(output.outputs[0].token_ids) >= stops_at:
                await llm.abort(f"request {number}")

    async def kill_workers() -> None:
        for share in kills:
            while len(finished) < share * count:
                await asyncio.sleep(0.01)
            workers = workers_of(llm)
            assert workers
            for worker in workers:
                worker.kill()

    async def all_of_them() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(kill_workers())
            for number in range(count):
                group.create_task(one(number))

    program.run(all_of_them())
    assert finished == Counter(range(count))
    assert not open_requests(llm) and not llm._awaited
    again = program.run_all(outputs(llm, number, "final") for number in looked_at)
    for number, (undisturbed,) in zip(looked_at, again, strict=True):
        found, expected = last[number].outputs[0], undisturbed.outputs[0]
        if found.finish_reason == "abort":
            assert number in aborted
            assert expected.token_ids[: len(found.token_ids)] == found.token_ids
        else:
            assert found == expected
    # Of a small sample all aborted ones may have ended before their abort came.
    reasons = Counter(output.outputs[0].finish_reason for output in last.values())
    assert reasons["abort"]
