"""``embed`` and ``score`` of ``LLM`` and ``AsyncLLM`` go through the death of any process."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
from support.library.joined import joining
from support.library.pooled_models import write_classifier

from penstock import LLM, AsyncLLM
from penstock.client.ledger import ClientLedger

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

ROLES = ("worker", "scheduler", "tokenizer", "router")
SLOW: dict[str, Any] = {"device": "null", "null_step_ms": 40, "max_num_seqs": 8}
COUNT = 400
"""Prompts; 50 steps of the engine."""
PATIENCE = 120.0


@pytest.fixture(scope="module")
def embedder() -> Iterator[LLM]:
    with LLM(task="embed", **SLOW) as llm:
        yield llm


@pytest.fixture(scope="module")
def ranker_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_classifier(tmp_path_factory.mktemp("models") / "ranker", ["relevant"])


@pytest.fixture(scope="module")
def ranker(ranker_folder: str) -> Iterator[LLM]:
    with LLM(ranker_folder, **SLOW) as llm:
        yield llm


def victim(owner: LLM, role: str) -> psutil.Process:
    """The living process of this role, once there is one."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        for process in psutil.Process(owner._server.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[:1] == [f"penstock: {role} 0"]:
                    return process
        time.sleep(0.01)
    raise AssertionError(f"there is no {role}")


def kill_amid(owner: LLM, role: str, ledger: ClientLedger) -> None:
    """Kill the process once some prompts of the client have their results, and others do not."""
    doomed, most = victim(owner, role), 0
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        still = ledger.open_of.total()
        most = max(most, still)
        if 0 < still < most:
            doomed.kill()
            return
        time.sleep(0.002)
    raise AssertionError(f"of {most} prompts none got done")


def called(owner: LLM, role: str, call: Callable[[LLM], Any]) -> Any:
    """What a call returns that goes through a kill."""
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(call, owner)
        kill_amid(owner, role, owner._client.ledger)
        return calling.result(PATIENCE)


def awaited(
    owner: LLM, role: str, llm: AsyncLLM, calls: Callable[[AsyncLLM], list[Awaitable[Any]]]
) -> list[Any]:
    """What many calls at once return, which go through a kill. llm: joins the owner's processes."""

    async def main() -> list[Any]:
        with joining(owner):
            await llm.start()
        async with llm:
            assert llm._processes.client is not None
            calling = asyncio.gather(*calls(llm))
            await asyncio.to_thread(kill_amid, owner, role, llm._processes.client.ledger)
            return list(await asyncio.wait_for(calling, PATIENCE))

    return asyncio.run(main())


@pytest.mark.parametrize("role", ROLES)
def test_vectors_come_whole_and_in_order_through_a_kill(embedder: LLM, role: str) -> None:
    prompts = [[9] * (1 + number % 30) + [number % 100 + 3] for number in range(COUNT)]

    def asked(llm: AsyncLLM) -> list[Awaitable[Any]]:
        return [llm.embed(ids, normalize=False) for ids in prompts]

    for found in (
        called(embedder, role, lambda llm: llm.embed(prompts, normalize=False)),
        awaited(embedder, role, AsyncLLM(task="embed", **SLOW), asked),
    ):
        assert [one.outputs.embedding for one in found] == [[len(ids), ids[-1]] for ids in prompts]
        assert [one.prompt_token_ids for one in found] == prompts


@pytest.mark.parametrize("role", ROLES)
def test_scores_come_whole_and_in_order_through_a_kill(
    ranker: LLM, ranker_folder: str, role: str
) -> None:
    texts = ["a weir " * (1 + number % 40) for number in range(COUNT)]
    expected = {text: ranker.score("a", text)[0].outputs.score for text in texts[:40]}

    def asked(llm: AsyncLLM) -> list[Awaitable[Any]]:
        return [llm.score("a", text) for text in texts]

    for found in (
        called(ranker, role, lambda llm: llm.score("a", texts)),
        awaited(ranker, role, AsyncLLM(ranker_folder, **SLOW), asked),
    ):
        assert [one.outputs.score for one in found] == [expected[text] for text in texts]
    assert len(set(expected.values())) == 40
