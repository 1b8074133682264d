"""``best_of``: more choices are generated than are answered, and the likeliest are."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from support.frontend.frontend_scripted import STOP, Client, run

from penstock.client.sink import RowExtras, Sink
from penstock.protocol.logprobs import NamedLogprobs
from penstock.protocol.wire.messages.requests import Work
from penstock.protocol.wire.messages.tokens import RowDetails

TEXT = "/v1/completions"
LOGPROBS = [-3.0, -0.5, -9.0, -0.5, -1.0]
"""Of the tokens of each choice."""


def details(logprob: float) -> RowDetails:
    entry = struct.pack("<iif", 1, 1, logprob)
    return RowDetails(0, NamedLogprobs(0, entry, [b" token"], [0]))


async def script(work: Work, sink: Sink) -> None:
    sink.on_accepted(3)
    for choice in range(work.params.n):
        found = details(LOGPROBS[choice])
        sink.on_row(choice, f"choice {choice}", 1, RowExtras(end=None, details=found))
        # A choice of many tokens is not worse for being long.
        for _ in range(choice):
            sink.on_row(choice, ".", 1, RowExtras(end=None, details=found))
        sink.on_row(choice, "", 0, RowExtras(end=STOP))


def answered(**asked: Any) -> tuple[dict[str, Any], Work]:
    found: list[dict[str, Any]] = []

    async def use(client: Client) -> None:
        status, answer, _ = await client.post(TEXT, {"prompt": "x", **asked})
        assert status == 200, answer
        found.append(answer)

    gateway = run(use, script)
    return found[0], gateway.works[0]


def test_the_choices_with_the_likeliest_tokens_are_answered_the_best_first() -> None:
    answer, work = answered(n=3, best_of=5)
    assert (work.params.n, work.params.logprobs, len(work.choices)) == (5, 0, 5)
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == ["choice 1.", "choice 3...", "choice 4...."]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert {choice["logprobs"] for choice in answer["choices"]} == {None}
    assert answer["usage"]["completion_tokens"] == 1 + 2 + 3 + 4 + 5


def test_logprobs_are_shown_where_they_are_asked_for() -> None:
    answer, work = answered(best_of=2, logprobs=0)
    (choice,) = answer["choices"]
    assert work.params.logprobs == 0
    assert choice["logprobs"]["token_logprobs"] == [-0.5, -0.5]


def test_as_many_as_n_are_not_chosen_among() -> None:
    answer, work = answered(n=2, best_of=2)
    assert work.params.logprobs is None
    assert [choice["text"] for choice in answer["choices"]] == ["choice 0", "choice 1."]


def test_each_prompt_has_its_own_best() -> None:
    answer, _ = answered(prompt=["x", "y"], best_of=2)
    assert [choice["text"] for choice in answer["choices"]] == ["choice 1.", "choice 1."]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"n": 3, "best_of": 2}, "best_of is 2; at least n, 3, is allowed"),
        ({"best_of": 2, "stream": True}, "send stream: false"),
        ({"best_of": 129}, "best_of is 129; 1 to 128 is allowed"),
        ({"best_of": 128, "prompt": ["a"] * 128}, "choices; at most"),
    ],
)
def test_what_cannot_be_chosen_among_is_refused(asked: dict[str, Any], words: str) -> None:
    async def use(client: Client) -> None:
        status, answer, _ = await client.post(TEXT, {"prompt": "x", **asked})
        assert (status, answer["error"]["param"]) == (400, "best_of")
        assert words in answer["error"]["message"]

    assert run(use).works == []
