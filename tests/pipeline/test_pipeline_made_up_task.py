"""A task and an API that only this test knows, brought by a package beside a whole server."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.pipeline.served import Served, served
from support.pipeline.site_package import install

PACKAGE = '''
import json

import msgspec

from penstock.protocol.sampling import SamplingParams
from penstock.protocol.wire.messages.requests import PromptText
from penstock.protocol.wire.messages.tokens import Vector
from penstock.services.frontend.bodies.requests import StreamOptions
from penstock.services.frontend.parse import GenerateRequest, find_model


class Doubled:
    """Brings twice the last hidden state of a text."""

    name = "double"

    def pool(self, hidden):
        return (2 * hidden).astype("<f4").tobytes()

    def event(self, values):
        return Vector(values)


class Body(msgspec.Struct):
    texts: list[str]
    task: str = "double"


class Vectors:
    """POST /made/up: ``{"texts": [...]}`` → a row of hexadecimal float32 for each."""

    name = "made-up"
    routes = ("/made/up",)

    def parse(self, raw, models, pause=None):
        body = msgspec.json.decode(raw, type=Body)
        model, name = find_model(None, models)
        return GenerateRequest(
            model=name, served=model.name, prompts=[PromptText(text) for text in body.texts],
            task=body.task,
        )

    def renderer(self, request, answer_id, created):
        return self

    def body(self, answers, usage):
        rows = [event.values.hex() for answer in answers for event in answer.events()]
        return json.dumps({"rows": rows, "tokens": usage.prompt}).encode()

    def error(self, error):
        return json.dumps({"made up": error.message}).encode()
'''
ENTRY_POINTS = {
    "penstock.tasks": "double = made_up:Doubled",
    "penstock.dialects": "made-up = made_up:Vectors",
}
LONG = "Once upon a time there was a penstock. " * 170


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    environment = install(tmp_path_factory.mktemp("site"), "made_up", PACKAGE, ENTRY_POINTS)
    flags = ["--device", "null", "--null-step-ms", "150"]
    flags += ["--max-num-batched-tokens", "64", "--max-num-seqs", "8"]
    with served(*flags, environment=environment) as found:
        yield found


def ask(server: Served, *texts: str, **more: str) -> tuple[int, dict[str, Any]]:
    return server.post("/made/up", {"texts": texts, **more})


def test_each_text_gets_its_own_vector(server: Served) -> None:
    texts = ("a", "a penstock", "a penstock and a weir", "a")
    status, answer = ask(server, *texts)
    assert status == 200, answer
    rows = [struct.unpack("<2f", bytes.fromhex(row)) for row in answer["rows"]]
    assert len(rows) == 4 and rows[0] == rows[3] and len(set(rows)) == 3
    # The null device's hidden state begins with the length of the prompt.
    assert sum(length for length, _ in rows) == 2 * answer["tokens"]


def test_a_task_that_nobody_does_is_refused_by_name(server: Served) -> None:
    status, answer = ask(server, "a", task="triple")
    assert status == 400
    assert "does not do the task 'triple'" in answer["made up"]
    assert "does: generate, double" in answer["made up"]


def test_a_vector_is_the_same_though_the_engine_s_scheduler_is_killed(server: Served) -> None:
    answers: list[tuple[int, dict[str, Any]]] = []
    asking = threading.Thread(target=lambda: answers.append(ask(server, LONG)))
    asking.start()
    while server.metrics().get("penstock_requests_running", 0) < 1:
        time.sleep(0.02)
    (scheduler,) = (p for p in server.processes().values() if server.role_of(p) == "scheduler")
    assert not answers
    scheduler.kill()
    asking.join(60)
    ((status, answer),) = answers
    assert status == 200, answer
    assert answer == ask(server, LONG)[1]
    assert scheduler.pid not in server.processes()
