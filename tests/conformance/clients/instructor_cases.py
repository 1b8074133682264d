"""instructor: typed answers by tools and by JSON schemas."""

from __future__ import annotations

from typing import Any

import instructor
import openai
import pytest
from asked import ANNA, MAX_TOKENS, TOO_LONG, Person
from instructor.core import InstructorRetryException


@pytest.fixture
def api(base_url: str, api_key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{base_url}/v1", api_key=api_key, max_retries=3)


@pytest.fixture
def asked(model: str) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": ANNA}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "max_retries": 3,
    }


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA])
def test_an_answer_is_typed_whole_and_in_parts(
    api: openai.OpenAI, asked: dict[str, Any], demo: bool, mode: instructor.Mode
) -> None:
    client = instructor.from_openai(api, mode=mode)
    answer = client.create(response_model=Person, **asked)
    assert isinstance(answer, Person)
    assert (answer.name, answer.age) == ("Anna", 36) or not demo
    *earlier, last = client.create_partial(response_model=Person, **asked)
    assert len(earlier) > 1
    assert (last.name, last.age) == (answer.name, answer.age)


def test_errors_name_what_the_server_said(
    api: openai.OpenAI, base_url: str, asked: dict[str, Any]
) -> None:
    stranger = openai.OpenAI(base_url=f"{base_url}/v1", api_key="wrong", max_retries=3)
    for client, wrong, words in (
        (api, {"model": "none-such"}, "none-such"),
        (api, {"temperature": 1e9}, "temperature"),
        (api, {"messages": [{"role": "user", "content": TOO_LONG}]}, "context_length_exceeded"),
        (stranger, {}, "invalid_api_key"),
    ):
        with pytest.raises(InstructorRetryException) as bad:
            instructor.from_openai(client).create(response_model=Person, **{**asked, **wrong})
        assert words in str(bad.value)
