"""/openapi.json is true: Schemathesis sends what it allows and what it forbids to every route."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.config import SchemathesisConfig
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi import checks
from support.frontend.frontend_scripted import (
    LENGTH,
    Client,
    ScriptedGateway,
    logprobs_of_a_token,
    of_any_task,
    run,
    say,
    serving,
)

from penstock.client.gateway_interface import ServedModel
from penstock.client.sink import RowExtras, Sink
from penstock.protocol.config.server_fields import ServerConfig
from penstock.protocol.wire.messages.membership import Peer
from penstock.protocol.wire.messages.requests import Work
from penstock.services.frontend.api_page import described
from penstock.services.frontend.app import OPEN_ROUTES
from penstock.services.frontend.dialects.registry import BUILT_IN
from penstock.services.frontend.openapi import describe

DESCRIPTION = describe(described(BUILT_IN), OPEN_ROUTES, with_keys=False)
CONFIG = SchemathesisConfig.from_dict(
    {"checks": {"negative_data_rejection": {"expected-statuses": ["4xx"]}}}
)
"""A body that is too large is a 413, which Schemathesis does not count as refused by itself."""
SCHEMA = schemathesis.openapi.from_dict(DESCRIPTION, config=CONFIG)
OPERATIONS = [(path, method) for path, found in DESCRIPTION["paths"].items() for method in found]
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    checks.unsupported_method,
]
"""All but that everything allowed is accepted: what holds between two fields is in no schema."""
FEW, MANY = 4, 200
"""Of each mode: 8 for a route with a body."""


async def _hello(work: Work, sink: Sink) -> None:
    """A step of a beam search has the logprobs that it asks for."""
    if work.params.ignore_eos and work.params.max_tokens == 1 and work.params.logprobs:
        sink.on_accepted(3)
        details = logprobs_of_a_token(work.params.logprobs)
        sink.on_row(0, "x", 1, RowExtras(end=LENGTH, details=details, prompt=bytes(12)))
        return
    await say("Hello", " world")(work, sink)


class OpenGateway(ScriptedGateway):
    """One that also tells of its members, and has room for anything."""

    def __init__(self) -> None:
        super().__init__(of_any_task(_hello))
        self.served = [ServedModel("org/model", ["alias"], 2**31 - 1, 2**31 - 1)]

    def members(self) -> list[Peer]:
        return []


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server in a thread of its own."""
    started, ended = threading.Event(), threading.Event()
    found: list[str] = []

    async def main() -> None:
        async with serving(OpenGateway()) as client:
            found.append(client.url)
            started.set()
            await asyncio.to_thread(ended.wait)

    thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    thread.start()
    assert started.wait(30)
    yield found[0]
    ended.set()
    thread.join(30)


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as session:
        yield session


def send(
    url: str, session: requests.Session, path: str, method: str, mode: GenerationMode, cases: int
) -> None:
    """Send so many generated requests to a route, and check each answer."""
    strategy = SCHEMA[path][method].as_strategy(generation_mode=mode)

    @given(case=strategy)
    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def each(case: schemathesis.Case) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body.pop("deadline_s", None)  # a time that is too short is a 504
        case.call_and_validate(base_url=url, session=session, checks=CHECKS)

    each()


def modes_of(path: str, method: str) -> list[GenerationMode]:
    """Only a body can be wrong: a name in the path or the query may be any text."""
    takes_body = "requestBody" in DESCRIPTION["paths"][path][method]
    return [GenerationMode.POSITIVE, *([GenerationMode.NEGATIVE] if takes_body else [])]


ALIKE = ("/v1/messages/count_tokens",)
"""Routes that take the bodies of another one."""
CASES = [(path, method, mode) for path, method in OPERATIONS for mode in modes_of(path, method)]


@pytest.mark.parametrize(
    ("path", "method", "mode"),
    [pytest.param(*case, marks=pytest.mark.slow if case[0] in ALIKE else ()) for case in CASES],
)
def test_answers_are_as_described_whatever_is_sent(
    url: str, session: requests.Session, path: str, method: str, mode: GenerationMode
) -> None:
    takes_body = "requestBody" in DESCRIPTION["paths"][path][method]
    send(url, session, path, method, mode, FEW if takes_body else 2 * FEW)


@pytest.mark.slow
@pytest.mark.parametrize(("path", "method", "mode"), CASES)
def test_answers_are_as_described_whatever_is_sent_many_times(
    url: str, session: requests.Session, path: str, method: str, mode: GenerationMode
) -> None:
    send(url, session, path, method, mode, MANY)


def test_the_description_and_its_page_need_no_key_and_say_which_routes_do() -> None:
    async def use(client: Client) -> None:
        status, found, _ = await client.get("/openapi.json")
        assert status == 200
        assert found["paths"]["/live"]["get"]["security"] == []
        assert "security" not in found["paths"]["/v1/chat/completions"]["post"]
        assert found["security"] == [{"bearer": []}, {"key": []}]
        status, page, response = await client.get("/docs")
        assert (status, response.content_type) == (200, "text/html")
        for name in ("docs/docs.js", "docs/docs.css"):
            assert name.encode() in page
            status, _, _ = await client.get(f"/{name}")
            assert status == 200
        assert (await client.get("/v1/models"))[0] == 401

    run(use, config=ServerConfig(api_key=["key-one"]))
