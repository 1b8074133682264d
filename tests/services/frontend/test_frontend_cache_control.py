"""What a body's ``cache_control`` asks of the prefix cache."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.client.gateway_interface import ServedModel
from penstock.protocol.wire.messages.cache_hints import Breakpoint, CacheHints
from penstock.protocol.wire.messages.requests import Chat
from penstock.services.frontend.dialects.anthropic.messages import MessagesDialect
from penstock.services.frontend.dialects.chat import ChatDialect
from penstock.services.frontend.dialects.completions import CompletionsDialect
from penstock.services.frontend.errors import ApiError

MODELS = [ServedModel("m", [], 4096, 1000)]
SHORT, LONG = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
MINUTES, HOUR = 300, 3600
TOOL = {"name": "f", "input_schema": {"type": "object"}}
FUNCTION = {"type": "function", "function": {"name": "f"}}
DIALECTS = {
    "anthropic": (MessagesDialect(), {"max_tokens": 9}),
    "chat": (ChatDialect(), {}),
    "completions": (CompletionsDialect(), {}),
}


def text(words: str, control: dict[str, str] | None = None) -> dict[str, Any]:
    marked = {} if control is None else {"cache_control": control}
    return {"type": "text", "text": words, **marked}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content[0] if isinstance(content[0], str) else content}


def assistant(*content: Any) -> dict[str, Any]:
    return {**user(*content), "role": "assistant"}


def system(*content: Any) -> dict[str, Any]:
    return {**user(*content), "role": "system"}


def hints(api: str, **body: Any) -> CacheHints | None:
    dialect, needed = DIALECTS[api]
    return dialect.parse(json.dumps({**needed, **body}).encode(), MODELS).cache


def marks(api: str, **body: Any) -> list[Breakpoint]:
    found = hints(api, **body)
    assert found is not None and not found.release
    return found.breakpoints


def refusal(api: str, **body: Any) -> str:
    with pytest.raises(ApiError) as caught:
        hints(api, **body)
    assert (caught.value.status, caught.value.param) == (400, "cache_control")
    return caught.value.message


def test_a_request_without_it_asks_for_nothing() -> None:
    assert hints("chat", messages=[user("a")]) is None
    assert hints("completions", prompt="a") is None
    assert hints("anthropic", messages=[user("a")], system=[text("s")], tools=[TOOL]) is None


@pytest.mark.parametrize("api", DIALECTS)
def test_of_the_request_it_retains_the_whole_prompt_or_releases_it(api: str) -> None:
    body: dict[str, Any] = {"prompt": "a"} if api == "completions" else {"messages": [user("a")]}
    assert marks(api, **body, cache_control=SHORT) == [Breakpoint(MINUTES)]
    assert marks(api, **body, cache_control=LONG) == [Breakpoint(HOUR)]
    assert hints(api, **body, cache_control={"type": "release"}) == CacheHints([], release=True)
    assert "ttl is allowed only" in refusal(api, **body, cache_control={**LONG, "type": "release"})
    for ttl in ("5 minutes", "99h", ""):
        words = refusal(api, **body, cache_control={**SHORT, "ttl": ttl})
        assert f"cache_control.ttl is {ttl!r}" in words and "'5m' or '1h'" in words
    assert "type is 'forever'" in refusal(api, **body, cache_control={"type": "forever"})


def test_marks_of_a_chat_stand_behind_parts_messages_and_tools() -> None:
    messages = [
        system(text("one", LONG), text("two")),
        user(text("a"), text("bc", SHORT), text("d")),
        assistant("x"),
        {**user("b")},
    ]
    assert marks("chat", messages=messages) == [Breakpoint(MINUTES, 1, 4), Breakpoint(HOUR, 0, 3)]
    messages[3]["cache_control"] = SHORT
    assert marks("chat", messages=messages) == [Breakpoint(MINUTES), Breakpoint(HOUR, 0, 3)]
    messages[2]["cache_control"] = LONG
    assert marks("chat", messages=messages) == [Breakpoint(MINUTES), Breakpoint(HOUR, 3, 0)]
    messages[3]["cache_control"] = LONG
    assert marks("chat", messages=messages) == [Breakpoint(HOUR)], "which the others end within"


@pytest.mark.parametrize("where", ["tool", "function", "system"])
def test_tools_and_the_systems_words_end_where_the_first_turn_begins(where: str) -> None:
    tool: dict[str, Any] = {**FUNCTION, "function": dict(FUNCTION["function"])}  # type: ignore[call-overload]
    said = system("s")
    {"tool": tool, "function": tool["function"], "system": said}[where]["cache_control"] = SHORT
    found = marks("chat", messages=[said, user("a"), user("b")], tools=[tool])
    assert found == [Breakpoint(MINUTES, 1, 0)]


def test_the_template_does_not_see_it() -> None:
    body = {"messages": [{**user(text("a", SHORT)), "cache_control": SHORT}]}
    (prompt,) = ChatDialect().parse(json.dumps(body).encode(), MODELS).prompts
    assert isinstance(prompt, Chat)
    assert json.loads(prompt.messages) == [user("a")]


def test_marks_of_anthropics_blocks_stand_behind_what_templates_make_of_them() -> None:
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "done"}
    messages = [
        user(text("a"), text("b")),
        user("c"),  # of one role: they become one message
        assistant(text("x"), call),
        user(result, text("more")),
    ]

    def marked(message: int, block: int, **body: Any) -> list[Breakpoint]:
        given = json.loads(json.dumps(messages))
        given[message]["content"][block]["cache_control"] = SHORT
        return marks("anthropic", messages=given, tools=[TOOL], **body)

    assert marked(0, 0) == [Breakpoint(MINUTES, 0, 1)]
    assert marked(0, 1) == [Breakpoint(MINUTES, 0, 3)]
    assert marked(2, 0) == [Breakpoint(MINUTES, 1, 1)]
    assert marked(2, 1) == [Breakpoint(MINUTES, 2, 0)]
    assert marked(3, 0, system="s") == [Breakpoint(MINUTES, 4, 0)]
    assert marked(3, 1) == [Breakpoint(MINUTES)]
    parts = {**result, "content": [text("done", LONG)]}
    assert marks("anthropic", messages=[*messages[:3], user(parts)]) == [Breakpoint(HOUR)]


def test_marks_of_anthropics_system_and_tools_end_at_the_first_turn() -> None:
    said = [text("one", SHORT), text("two", LONG)]
    assert marks("anthropic", messages=[user("a")], system=said) == [Breakpoint(HOUR, 1, 0)]
    said = [text("one", LONG), text("two", SHORT)]
    found = marks("anthropic", messages=[user("a")], system=said)
    assert found == [Breakpoint(MINUTES, 1, 0), Breakpoint(HOUR, 0, 3)]
    tool = {**TOOL, "cache_control": {**SHORT, "scope": "global"}}
    assert marks("anthropic", messages=[user("a")], tools=[tool]) == [Breakpoint(MINUTES, 0, 0)]
    found = marks("anthropic", messages=[user("a")], tools=[tool], system="s")
    assert found == [Breakpoint(MINUTES, 1, 0)]


@pytest.mark.parametrize("api", ["anthropic", "chat"])
def test_thousands_of_marks_are_refused_by_their_number(api: str) -> None:
    four = [user(*[text("a", SHORT)] * 4)]
    assert marks(api, messages=four) == [Breakpoint(MINUTES)]
    assert "at 5 places; at most 4" in refusal(api, messages=four, cache_control=SHORT)
    many = [user(*[text("a", SHORT)] * 1000)] * 5
    assert "at 5000 places; at most 4" in refusal(api, messages=many)


@pytest.mark.parametrize("api", ["anthropic", "chat"])
def test_a_part_cannot_be_released(api: str) -> None:
    with pytest.raises(ApiError, match="cache_control"):
        hints(api, messages=[user(text("a", {"type": "release"}))])


def test_a_beam_search_takes_none() -> None:
    words = refusal(
        "completions", prompt="a", use_beam_search=True, n=2, max_tokens=4, cache_control=SHORT
    )
    assert "use_beam_search" in words
