"""What became of a request, told to whom it belongs; and what an administrator may do."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.frontend.frontend_scripted import Client, rejected, run, say
from support.frontend.key_files import Keys

from penstock.client.sink import RowExtras, Sink
from penstock.protocol.process import logs
from penstock.protocol.wire.messages.administration import (
    REQUEST_PROGRESS,
    Ask,
    EngineProgress,
    FoundRequest,
    RequestName,
)
from penstock.protocol.wire.messages.requests import Work
from penstock.protocol.wire.messages.tokens import End, EndReason, RowStart
from penstock.services.frontend.context import CONTEXT
from penstock.services.frontend.requests import routes
from penstock.services.frontend.requests.routes import BEGIN_DRAIN, answer

TEXT = "/v1/completions"
ONE = {"prompt": "x", "max_tokens": 5}


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


class Steps:
    """A script that goes on when it is told to."""

    def __init__(self) -> None:
        self.accepts, self.begins, self.ends = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def __call__(self, work: Work, sink: Sink) -> None:
        await self.accepts.wait()
        sink.on_accepted(7)
        sink.on_continued()
        await self.begins.wait()
        sink.on_row(0, "a", 1, RowExtras(RowStart(0, 4, 0.001, "7")))
        await self.ends.wait()
        sink.on_row(0, "b", 1, RowExtras(end=End(0, EndReason.LENGTH, preemptions=2)))


async def life(client: Client, name: str, headers: dict[str, str]) -> Any:
    status, answer, _ = await client.get(f"/v1/requests/{name}", headers=headers)
    assert status == 200, answer
    return answer


async def until(client: Client, name: str, headers: dict[str, str], state: str) -> Any:
    while (found := await life(client, name, headers))["state"] != state:
        await asyncio.sleep(0.001)
    return found


def test_a_request_tells_its_states_while_it_runs_and_afterwards(keys: Keys) -> None:
    ann = keys.add("ann")
    headers = {**ann, "x-request-id": "mine"}

    async def use(client: Client) -> None:
        steps = client.gateway.script
        assert isinstance(steps, Steps)
        asked = asyncio.create_task(client.post(TEXT, ONE, headers=headers))
        while not client.gateway.works:
            await asyncio.sleep(0.001)
        second = {**ann, "x-request-id": "second"}
        behind = asyncio.create_task(client.post(TEXT, ONE, headers=second))
        while len(client.gateway.works) < 2:
            await asyncio.sleep(0.001)
        found = await life(client, "mine", ann)
        assert (found["state"], found["ahead"], found["key"]) == ("received", 0, "ann")
        assert (await life(client, "second", ann))["ahead"] == 1
        steps.accepts.set()
        found = await until(client, "mine", ann, "queued")
        assert found["prompt_tokens"] == 7
        steps.begins.set()
        found = await until(client, "mine", ann, "first_token")
        assert (found["ahead"], found["cached_tokens"], found["output_tokens"]) == (None, 4, 1)
        assert found["finish"] is None
        steps.ends.set()
        assert (await asked)[0] == 200
        await behind
        found = await life(client, "mine", ann)
        names = [one["state"] for one in found["states"]]
        assert names == ["received", "queued", "running", "first_token", "finished"]
        times = [one["at"] for one in found["states"]]
        assert times == sorted(times)
        assert (found["finish"], found["continuations"], found["model"]) == (
            "length", 1, "org/model",
        )  # fmt: skip
        assert (found["engine"], found["preemptions"], found["queue_ms"]) == ("7", 2, 1.0)
        assert found["total_ms"] >= found["prefill_ms"] + found["decode_ms"]

    async def main_script(work: Work, sink: Sink) -> None:
        raise AssertionError

    async def wrapped(client: Client) -> None:
        client.gateway.script = Steps()
        await use(client)

    run(wrapped, main_script, config=keys.config)


class Engines:
    """Of which one has the requests with these ids, and says how far it is."""

    def __init__(self, *progress: EngineProgress) -> None:
        self.progress = {one.id: one for one in progress}

    def __call__(self, what: str, about: bytes) -> bytes:
        assert what == REQUEST_PROGRESS
        ids = msgspec.msgpack.decode(about, type=list[int])
        found = [self.progress[number] for number in ids if number in self.progress]
        return msgspec.msgpack.encode(found) if found else b""


async def opened(client: Client, body: dict[str, Any], name: str, headers: Any) -> Any:
    """A request that an engine has taken, and that has no token yet."""
    steps = client.gateway.script = Steps()
    steps.accepts.set()
    opened_before = len(client.gateway.works)
    asked = asyncio.create_task(client.post(TEXT, body, headers={**headers, "x-request-id": name}))
    while len(client.gateway.works) == opened_before:
        await asyncio.sleep(0.001)
    await until(client, name, headers, "queued")
    return asked, steps


def test_what_the_engine_tells_while_it_runs_is_in_the_answer(keys: Keys) -> None:
    ann = keys.add("ann")

    async def use(client: Client) -> None:
        client.gateway.script = Steps()
        while_unknown = asyncio.create_task(client.post(TEXT, ONE, headers=ann))
        asked, steps = await opened(client, ONE, "mine", ann)
        found = await life(client, "mine", ann)
        assert (found["told_by"], found["prefilled_tokens"]) == ("frontend", None)
        waits = EngineProgress(2, "3", 7, waits_for="slot", ahead=4)
        client.gateway.engines_answer = [lambda what, about: b"", Engines(waits)]
        found = await life(client, "mine", ann)
        assert (found["told_by"], found["state"], found["engine"]) == ("engine", "queued", "3")
        assert (found["ahead"], found["waits_for"], found["prefilled_tokens"]) == (4, "slot", 0)
        runs = EngineProgress(2, "3", 5, queued_s=0.25, cached=1, preemptions=2)
        client.gateway.engines_answer = [Engines(runs)]
        found = await life(client, "mine", ann)
        assert [one["state"] for one in found["states"]] == ["received", "queued", "running"]
        assert (found["state"], found["queue_ms"], found["preemptions"]) == ("running", 250.0, 2)
        assert (found["prefilled_tokens"], found["cached_tokens"]) == (2, 1)
        assert (found["ahead"], found["waits_for"], found["output_tokens"]) == (None, None, 0)
        times = [one["at"] for one in found["states"]]
        assert times == sorted(times)
        steps.begins.set()
        steps.ends.set()
        await asked
        found = await life(client, "mine", ann)
        assert (found["told_by"], found["state"]) == ("frontend", "finished")
        while_unknown.cancel()

    run(use, config=keys.config)


def test_several_prompts_are_whole_when_all_their_engines_tell(keys: Keys) -> None:
    ann = keys.add("ann")

    async def use(client: Client) -> None:
        asked, _ = await opened(client, {**ONE, "prompt": ["x", "y"]}, "two", ann)
        first = Engines(EngineProgress(1, "0", 0, queued_s=0.1))
        second = Engines(EngineProgress(2, "1", 3, waits_for="grammar"))
        client.gateway.engines_answer = [first]
        found = await life(client, "two", ann)
        assert (found["told_by"], found["prefilled_tokens"]) == ("frontend", None)
        client.gateway.engines_answer = [first, second]
        found = await life(client, "two", ann)
        assert (found["told_by"], found["prefilled_tokens"]) == ("engine", 11)
        assert (found["engine"], found["waits_for"], found["ahead"]) == ("0,1", "grammar", None)
        context = client.app[CONTEXT]
        about = msgspec.msgpack.encode(RequestName("two"))
        told = answer(context, Ask("", 1, "find_request", about)).answer
        assert msgspec.msgpack.decode(told, type=FoundRequest).open_ids == [1, 2]
        asked.cancel()

    run(use, config=keys.config)


def test_a_request_is_its_keys_own_and_an_admins_and_nobody_elses(keys: Keys) -> None:
    ann, bob, root = keys.add("ann"), keys.add("bob"), keys.add("root", "admin")

    async def use(client: Client) -> None:
        for headers in (ann, bob):
            await client.post(TEXT, ONE, headers={**headers, "x-request-id": "same"})
        assert (await life(client, "same", ann))["key"] == "ann"
        assert (await life(client, "same", bob))["key"] == "bob"
        assert (await life(client, "same", root))["key"] == "bob"  # the newest
        _, _, response = await client.post(TEXT, ONE, headers=ann)
        name = response.headers["x-request-id"]
        assert (await life(client, name, ann))["state"] == "finished"
        status, answer, _ = await client.get(f"/v1/requests/{name}", headers=bob)
        assert (status, answer["error"]["code"]) == (404, "request_not_found")

    run(use, config=keys.config)


def test_failures_and_refusals_are_told_with_their_error(keys: Keys) -> None:
    ann = keys.add("ann", requests_per_minute=1)

    async def script(work: Work, sink: Sink) -> None:
        sink.on_accepted(3)
        sink.on_rejected(rejected(500, "it broke"))

    async def use(client: Client) -> None:
        for name, state, said in (
            ("first", "failed", "it broke"),
            ("second", "refused", "has begun 1 requests in the last minute"),
        ):
            await client.post(TEXT, ONE, headers={**ann, "x-request-id": name})
            found = await life(client, name, ann)
            assert found["state"] == state
            assert said in found["error"]

    run(use, script, config=keys.config)


def test_what_another_frontend_had_is_found_through_it(keys: Keys) -> None:
    ann = keys.add("ann")

    async def use(client: Client) -> None:
        await client.post(TEXT, ONE, headers={**ann, "x-request-id": "mine"})
        context = client.app[CONTEXT]
        tenant = context.keys.of_text(ann["Authorization"].removeprefix("Bearer ")).tenant

        def told(name: str, whose: str | None) -> bytes:
            about = msgspec.msgpack.encode(RequestName(name, whose))
            return answer(context, Ask("", 1, "find_request", about)).answer

        found = told("mine", tenant)
        known = msgspec.msgpack.decode(found, type=FoundRequest)
        assert (json.loads(known.life)["id"], known.open_ids) == ("mine", [])
        assert told("mine", None) == found
        assert told("mine", "somebody") == told("other", None) == b""
        assert answer(context, Ask("", 1, "find_request", b"\xc1")).answer == b""

        client.gateway.others_answer = [lambda what, about: found, lambda what, about: b""]
        assert (await life(client, "elsewhere", ann))["id"] == "mine"

    run(use, config=keys.config)


def test_the_ended_ones_are_bounded_in_number_and_age(keys: Keys) -> None:
    ann = keys.add("ann")

    async def use(client: Client) -> None:
        history = client.app[CONTEXT].history
        history._max_ended = 3
        for number in range(5):
            await client.post(TEXT, ONE, headers={**ann, "x-request-id": f"r{number}"})
        known = [(await client.get(f"/v1/requests/r{n}", headers=ann))[0] for n in range(5)]
        assert known == [404, 404, 200, 200, 200]
        history._max_age_s = -1.0
        assert (await client.get("/v1/requests/r4", headers=ann))[0] == 404

    run(use, config=keys.config)


def test_an_admin_ends_a_request_by_its_id_and_others_may_not(keys: Keys) -> None:
    ann, root = keys.add("ann"), keys.add("root", "admin")
    path = "/v1/admin/requests/mine/abort"

    async def use(client: Client) -> None:
        client.gateway.script = Steps()
        asked = asyncio.create_task(client.post(TEXT, ONE, headers={**ann, "x-request-id": "mine"}))
        while not client.gateway.works:
            await asyncio.sleep(0.001)
        for headers in (ann, {"x-api-key": "of-the-flag"}):
            status, answer, _ = await client.post(path, {}, headers=headers)
            assert status == 403
            assert "this route is for the role admin" in answer["error"]["message"]
        status, answer, _ = await client.post(path, {}, headers=root)
        assert (status, answer) == (200, {"id": "mine", "aborted": 1})
        status, answer, _ = await asked
        assert status == 499
        assert answer["error"]["code"] == "aborted"
        assert client.gateway.cancelled == [1]
        assert (await life(client, "mine", ann))["state"] == "aborted"
        status, _, _ = await client.post(path, {}, headers=root)
        assert status == 404
        client.gateway.others_answer = [lambda what, about: b"\x91\x02"]  # msgpack: [2]
        status, answer, _ = await client.post(path, {}, headers=root)
        assert (status, answer["aborted"]) == (200, 2)

    run(use, config=keys.config)


def test_without_keys_admin_routes_are_closed() -> None:
    async def use(client: Client) -> None:
        for path, body in ((routes.DRAIN, {}), (routes.LEVEL, {"level": "debug"})):
            status, answer, _ = await client.post(path, body)
            assert status == 403
            assert "This server has no keys" in answer["error"]["message"]
        await client.post(TEXT, ONE, headers={"x-request-id": "mine"})
        assert (await life(client, "mine", {}))["key"] == ""

    run(use)


def test_an_admin_begins_the_draining(keys: Keys) -> None:
    root = keys.add("root", "admin")
    begun: list[str] = []

    async def use(client: Client) -> None:
        status, _, _ = await client.post(routes.DRAIN, {}, headers=root)
        assert status == 400
        client.app._state[BEGIN_DRAIN] = lambda: begun.append("x") or "server"
        status, answer, _ = await client.post(routes.DRAIN, {}, headers=root)
        assert (status, answer) == (202, {"status": "draining", "scope": "server"})

    run(use, config=keys.config)
    assert begun == ["x"]


def test_an_admin_changes_the_level_of_the_log(
    keys: Keys, capfd: pytest.CaptureFixture[str]
) -> None:
    root, ann = keys.add("root", "admin"), keys.add("ann")
    logs.set_up("frontend", "error", "json")

    async def use(client: Client) -> None:
        client.gateway.others_answer = [lambda what, about: about]
        await client.post(TEXT, ONE, headers={**ann, "x-request-id": "unseen"})
        status, answer, _ = await client.post(routes.LEVEL, {"level": "info"}, headers=root)
        assert (status, answer) == (200, {"level": "info", "processes": 2})
        await client.post(TEXT, ONE, headers={**ann, "x-request-id": "seen"})
        status, _, _ = await client.post(routes.LEVEL, {"level": "loud"}, headers=root)
        assert status == 400

    run(use, say("x"), config=keys.config)
    logs.set_up("frontend", "error", "json")
    logs.flush()
    ids = [json.loads(line).get("id") for line in capfd.readouterr().err.splitlines()]
    assert "seen" in ids
    assert "unseen" not in ids
