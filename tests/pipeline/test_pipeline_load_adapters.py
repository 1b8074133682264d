"""Adapters are loaded and unloaded while a server runs, over vLLM's routes."""

from __future__ import annotations

import asyncio
import json
import random
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
from support.chaos.victims import find
from support.pipeline.adapter_folders import write_adapter
from support.pipeline.clients import Answer, take_event
from support.pipeline.served import SMALL, Served, added_key, served
from support.polling import until

from penstock.loadtest.models.make_adapters import linear_sizes

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
TEXT = {"prompt": "The water wheel turns", "max_tokens": 24, "temperature": 0, "ignore_eos": True}


EIGHT = [f"wheel-{number}" for number in range(8)]
"""As many as may be loaded; two of them are on the device at once, and four in memory."""


class Setup(NamedTuple):
    server: Served
    dirs: Path
    modules: dict[str, tuple[int, int]]
    root: str
    ann: str

    def write(self, name: str, seed: int = 0, **more: Any) -> None:
        write_adapter(self.dirs / name, self.modules, seed=seed, **more)

    def post(self, path: str, body: dict[str, Any], key: str = "") -> tuple[int, str]:
        request = urllib.request.Request(
            self.server.url + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {key or self.root}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def load(self, name: str, path: str = "", **more: Any) -> tuple[int, str]:
        return self.post(LOAD, {"lora_name": name, "lora_path": path or name, **more})

    def unload(self, name: str) -> tuple[int, str]:
        return self.post(UNLOAD, {"lora_name": name})

    def metric(self, name: str) -> float:
        request = urllib.request.Request(
            self.server.url + "/metrics", headers={"Authorization": f"Bearer {self.root}"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            lines: list[str] = answer.read().decode().splitlines()
        found = [line for line in lines if line.startswith(f"penstock_{name}")]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    def until(self, name: str, fits: Callable[[float], bool]) -> None:
        """Wait for a metric, which travels in the beats."""
        until(lambda: fits(self.metric(name)), told=lambda: f"{name} is {self.metric(name)}")

    def wait_until_none_is_loaded(self) -> None:
        """Memory of what was unloaded is given back a moment later."""
        self.until("adapters_loaded", lambda count: not count)

    def text(self, model: str) -> str:
        status, found = self.post("/v1/completions", {**TEXT, "model": model})
        return json.loads(found)["choices"][0]["text"] if status == 200 else f"{status}"


@pytest.fixture(scope="module")
def setup(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    dirs = tmp_path_factory.mktemp("loras")
    keys = tmp_path_factory.mktemp("keys") / "keys"
    ann, root = added_key(keys, "ann"), added_key(keys, "root", "admin")
    flags = (str(small_model), *SMALL, "--served-model-name", "base", "--max-loras", "2")
    flags = (*flags, "--max-cpu-loras", "4", "--max-registered-loras", str(len(EIGHT)))
    with served(*flags, "--lora-dirs", str(dirs), "--keys-file", str(keys)) as server:
        yield Setup(server, dirs, linear_sizes(small_model), root, ann)


def test_an_adapter_comes_is_replaced_and_goes(setup: Setup) -> None:
    setup.write("mill", 1)
    base = setup.text("base")
    assert setup.text("mill") == "404"
    assert setup.load("mill") == (200, "Success: LoRA adapter 'mill' added successfully.")
    first = setup.text("mill")
    assert first not in (base, "404")
    status, found = setup.load("mill")
    assert status == 400 and "already been loaded" in found
    setup.write("mill", 2)
    assert setup.load("mill", load_inplace=True)[0] == 200
    assert setup.text("mill") not in (base, first, "404")
    assert setup.unload("mill") == (200, "Success: LoRA adapter 'mill' removed successfully.")
    assert setup.text("mill") == "404" and setup.text("base") == base
    status, found = setup.unload("mill")
    assert status == 404 and "cannot be found" in found


def test_what_cannot_be_loaded_is_refused_by_name_and_leaves_nothing(setup: Setup) -> None:
    setup.write("sound", 3)
    setup.write("wrong", config={"r": 3})
    outside = setup.dirs.parent
    for status, name, path, words in (
        (403, "x", str(outside), "not below --lora-dirs"),
        (403, "x", "../..", "not below --lora-dirs"),
        (404, "x", "nowhere", "no such folder below --lora-dirs"),
        (400, "x", "wrong", "instead of"),
        (400, "x\n", "sound", "cannot be printed"),
        (409, "base", "sound", "There is a model 'base'"),
    ):
        found = setup.load(name, path)
        assert found[0] == status and words in found[1], found
    assert setup.post(LOAD, {"lora_name": "x", "lora_path": "sound"}, setup.ann)[0] == 403
    assert setup.text("x") == "404"


@pytest.fixture
def eight(setup: Setup) -> Iterator[dict[str, str]]:
    """Adapters that are loaded, and what each says alone."""
    for seed, name in enumerate(EIGHT):
        setup.write(name, 10 + seed)
    setup.wait_until_none_is_loaded()
    with ThreadPoolExecutor(len(EIGHT)) as pool:
        assert {status for status, _ in pool.map(setup.load, EIGHT)} == {200}
        yield {name: setup.text(name) for name in EIGHT}
        list(pool.map(setup.unload, EIGHT))
    setup.wait_until_none_is_loaded()


def asked_at_once(
    setup: Setup, names: Sequence[str], then: Callable[[], object] = lambda: None
) -> list[str]:
    """What each says, all asked at once; then: what happens meanwhile."""
    with ThreadPoolExecutor(len(names)) as pool:
        texts = [pool.submit(setup.text, name) for name in names]
        then()
        return [text.result() for text in texts]


def test_eight_adapters_in_two_places_say_together_what_each_says_alone(
    setup: Setup, eight: dict[str, str]
) -> None:
    assert len(set(eight.values())) == len(EIGHT) and "404" not in eight.values()
    names = random.Random(0).choices(EIGHT, k=24)
    base = setup.text("base")
    texts = asked_at_once(setup, ["base", *names])
    assert texts == [base, *(eight[name] for name in names)]
    status, found = setup.load("ninth", EIGHT[0])
    assert status == 400 and "8 adapters are loaded, as --max-registered-loras" in found, found
    setup.until("adapters_resident", lambda count: count == 2)
    setup.until("adapters_evicted_total", lambda count: count >= 6)


def test_an_adapter_that_is_unloaded_while_requests_wait_for_it_answers_them(
    setup: Setup, eight: dict[str, str]
) -> None:
    """Also those that wait for a place while others have them."""
    names = [name for name in EIGHT[:4] for _ in range(3)]

    def unload() -> None:
        assert setup.unload(EIGHT[3])[0] == 200

    texts = asked_at_once(setup, names, unload)
    assert set(texts[:9]) == {eight[name] for name in EIGHT[:3]}
    assert set(texts[9:]) <= {eight[EIGHT[3]], "404"}
    assert setup.text(EIGHT[3]) == "404"


@pytest.mark.chaos
def test_adapters_take_turns_through_the_deaths_of_workers(
    setup: Setup, eight: dict[str, str]
) -> None:
    names = random.Random(1).choices(EIGHT, k=32)

    def kill() -> None:
        for _ in range(2):
            find(setup.server, "worker").kill()
            assert setup.text(names[0]) == eight[names[0]]

    assert asked_at_once(setup, names, kill) == [eight[name] for name in names]


@pytest.mark.chaos
@pytest.mark.parametrize("roles", [("worker",), ("scheduler",), ("worker", "scheduler")])
def test_streams_go_on_with_a_loaded_adapter_through_deaths_and_its_unloading(
    setup: Setup, roles: tuple[str, ...]
) -> None:
    setup.write("kept", 5)
    assert setup.load("kept")[0] == 200
    body = {**TEXT, "model": "kept", "max_tokens": 200, "stream": True}

    async def one(begun: asyncio.Event) -> Answer:
        answer, events = Answer(200), 0
        headers = {"Authorization": f"Bearer {setup.root}"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(setup.server.url + "/v1/completions", json=body) as response,
        ):
            async for line in response.content:
                take_event(answer, line)
                events += line.startswith(b"data: ")
                if events == 10:
                    begun.set()
        return answer

    async def run(*, kill: bool) -> Answer:
        begun = asyncio.Event()
        stream = asyncio.create_task(one(begun))
        await begun.wait()
        for role in roles if kill else ():
            find(setup.server, role).kill()
        return await stream

    expected = asyncio.run(run(kill=False))
    assert expected.done and expected.error is None
    got = asyncio.run(run(kill=True))
    assert got.error is None and got.text == expected.text
    again = setup.text("kept")  # the replacement has it
    assert len(again) > 3 and expected.text[0].startswith(again)

    async def unloaded() -> Answer:
        begun = asyncio.Event()
        stream = asyncio.create_task(one(begun))
        await begun.wait()
        assert (await asyncio.to_thread(setup.unload, "kept"))[0] == 200
        if roles == ("scheduler",):  # the next one lets the stream go on, and nobody new begin
            find(setup.server, "scheduler").kill()
        return await stream

    last = asyncio.run(unloaded())
    assert last.error is None and last.text == expected.text
    assert setup.text("kept") == "404"
