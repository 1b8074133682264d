"""What a body of Anthropic's Messages API asks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.client.gateway_interface import ServedModel
from penstock.protocol.declared import describe, description_of, fields_of
from penstock.protocol.wire.messages.requests import Chat, OutputFormat
from penstock.services.frontend.bodies.anthropic import CountTokensBody, MessagesBody
from penstock.services.frontend.dialects.anthropic.messages import (
    CountTokensDialect,
    MessagesDialect,
)
from penstock.services.frontend.dialects.anthropic.renderer import MessagesRequest
from penstock.services.frontend.dialects.anthropic.signature import sign
from penstock.services.frontend.errors import ApiError

MODELS = [ServedModel("org/model", ["alias"], 4096, 1000)]
HELLO = [{"role": "user", "content": "hi"}]
WEATHER = {
    "name": "weather",
    "description": "How it is outside.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def parsed(**body: Any) -> MessagesRequest:
    asked = {"messages": HELLO, "max_tokens": 2000, **body}
    return MessagesDialect().parse(json.dumps(asked).encode(), MODELS)


def chat(**body: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The messages and the template's variables."""
    (prompt,) = parsed(**body).prompts
    assert isinstance(prompt, Chat)
    return msgspec.json.decode(prompt.messages), msgspec.json.decode(prompt.template_kwargs)


def messages(*given: Any, **body: Any) -> list[dict[str, Any]]:
    return chat(messages=list(given), **body)[0]


def output(**body: Any) -> OutputFormat:
    found = parsed(**body).output
    assert found is not None
    return found


def refusal(**body: Any) -> str:
    with pytest.raises(ApiError) as caught:
        parsed(**body)
    assert caught.value.status == 400
    return caught.value.message


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


CALL = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}}
IMAGE = {"type": "image", "source": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "rain"}


def test_a_small_request_is_read() -> None:
    request = parsed(
        model="alias", temperature=0.5, top_p=0.9, top_k=40, stop_sequences=["##"], stream=True,
        metadata={"user_id": "u-1"}, priority=-3, cache_salt="mine", deadline_s=9, seed=7,
    )  # fmt: skip
    params = request.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (
        2000,
        0.5,
        0.9,
        40,
    )
    assert (params.stop, params.seed, params.n) == (["##"], 7, 1)
    assert (request.model, request.served, request.stream) == ("alias", "org/model", True)
    terms = request.terms
    assert (terms.user, terms.priority, terms.cache_salt) == ("u-1", -3, "mine")
    assert terms.deadline_s == 9 and request.fits_window
    assert chat() == ([{"role": "user", "content": "hi"}], {
        "enable_thinking": False, "thinking": False,
    })  # fmt: skip


@pytest.mark.parametrize(
    ("system", "said"),
    [
        ("Be brief.", ["Be brief."]),
        ([text("Be", cache_control={"type": "ephemeral"}), text("brief.")], ["Be\nbrief."]),
        ([text("x-anthropic-billing-header: cc_version=2; cch=0d1f;"), text("Be.")], ["Be."]),
        ("x-anthropic-billing-header: cc_version=2; cch=0d1f;\nBe.", ["Be."]),
        ([text("x-anthropic-billing-header: cc_version=2;")], []),
        ("It says x-anthropic-billing-header: a", ["It says x-anthropic-billing-header: a"]),
        ("", []),
        ([], []),
    ],
)
def test_a_system_prompt_comes_first_without_the_line_that_is_new_in_each_request(
    system: Any, said: list[str]
) -> None:
    *first, last = messages(*HELLO, system=system)
    assert first == [{"role": "system", "content": one} for one in said]
    assert last == HELLO[0]


def test_consecutive_messages_of_one_role_become_one() -> None:
    assert messages(
        {"role": "user", "content": "a"},
        user(text("b"), text("c")),
        {"role": "assistant", "content": "d"},
        assistant(text("e")),
        {"role": "system", "content": "f"},
        {"role": "user", "content": "g"},
    ) == [
        {"role": "user", "content": "a\nb\nc"},
        {"role": "assistant", "content": "d\ne"},
        {"role": "system", "content": "f"},
        {"role": "user", "content": "g"},
    ]


def test_calls_and_their_results_become_those_that_templates_know() -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": sign("Hm.")}
    other = {**CALL, "id": "t2", "input": {}, "caller": {"type": "direct"}}
    failed = {**RESULT, "tool_use_id": "t2", "content": [text("no"), text("sky")], "is_error": True}
    assert messages(
        *HELLO,
        assistant(thought, text("Let me see.", citations=None), CALL, other),
        user(RESULT, failed, text("And?", cache_control={"type": "ephemeral", "ttl": "1h"})),
        tools=[WEATHER],
    ) == [
        HELLO[0],
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": "t1", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}},
                {"id": "t2", "function": {"name": "weather", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "name": "weather", "content": "rain"},
        {"role": "tool", "tool_call_id": "t2", "name": "weather", "content": "Error: no\nsky"},
        {"role": "user", "content": "And?"},
    ]


def test_the_result_of_a_tool_may_be_nothing_and_an_error_is_not_called_one_twice() -> None:
    results = [
        {"type": "tool_result", "tool_use_id": "t1"},
        {**RESULT, "content": "error 7", "is_error": True},
    ]
    found = messages(*HELLO, assistant(CALL), user(*results))[2:]
    assert [one["content"] for one in found] == ["", "error 7"]


def test_a_model_is_told_of_an_image_that_its_tool_has_brought() -> None:
    seen = {**RESULT, "content": [text("A screen:"), IMAGE]}
    (told,) = [
        one for one in messages(*HELLO, assistant(CALL), user(seen)) if one["role"] == "tool"
    ]
    assert told["content"] == "A screen:\n[An image, which you cannot see: you read text alone.]"


def test_an_assistant_s_last_message_is_continued() -> None:
    found, variables = chat(messages=[*HELLO, assistant(text("It is"))])
    assert found[-1] == {"role": "assistant", "content": "It is"}
    assert variables["continue_final_message"] is True
    assert variables["add_generation_prompt"] is False
    for empty in ("", []):
        found, variables = chat(messages=[*HELLO, {"role": "assistant", "content": empty}])
        assert found == HELLO and "continue_final_message" not in variables


def test_tools_and_the_choice_among_them_are_passed_on() -> None:
    strict = {**WEATHER, "name": "exact", "strict": True, "type": "custom", "cache_control": {}}
    found = output(tools=[WEATHER, strict])
    declared = msgspec.json.decode(found.tools)
    assert declared[0] == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "How it is outside.",
            "parameters": WEATHER["input_schema"],
        },
    }
    assert (found.mode, found.allowed, found.strict, found.parallel) == (
        "auto",
        [],
        ["exact"],
        True,
    )
    for choice, mode, allowed in (
        ({"type": "auto"}, "auto", []),
        ({"type": "any"}, "required", []),
        ({"type": "tool", "name": "weather"}, "required", ["weather"]),
        ({"type": "none"}, "none", []),
    ):
        choice["disable_parallel_tool_use"] = True
        found = output(tools=[WEATHER], tool_choice=choice)
        assert (found.mode, found.allowed, found.parallel) == (mode, allowed, False)


def names_of_tools(**body: Any) -> list[str]:
    return [one["function"]["name"] for one in msgspec.json.decode(output(**body).tools or b"[]")]


SEARCH = {"name": "search", "input_schema": {"type": "object"}}
WAITING = [{**SEARCH, "name": name, "defer_loading": True} for name in ("first", "second", "third")]


def searched(*names: str) -> list[dict[str, Any]]:
    """What a client's own search of tools has found."""
    found = [{"type": "tool_reference", "tool_name": name} for name in names]
    call = {"type": "tool_use", "id": "s", "name": "search", "input": {}}
    return [assistant(call), user({"type": "tool_result", "tool_use_id": "s", "content": found})]


def test_a_tool_that_waits_is_offered_behind_the_others_once_a_search_has_named_it() -> None:
    tools = [WAITING[0], SEARCH, *WAITING[1:], WEATHER]
    assert names_of_tools(tools=tools) == ["search", "weather"]
    talk = [*HELLO, *searched("third", "first")]
    assert names_of_tools(tools=tools, messages=talk) == ["search", "weather", "third", "first"]
    more = [*talk, *searched("first", "second")]
    assert names_of_tools(tools=tools, messages=more)[2:] == ["third", "first", "second"]
    assert messages(*talk, tools=tools)[-1]["content"] == (
        "The tool third can be called now.\nThe tool first can be called now."
    )
    assert names_of_tools(tools=[{**WEATHER, "defer_loading": False}]) == ["weather"]
    assert "none of the tools given" in refusal(
        tools=tools, tool_choice={"type": "tool", "name": "first"}
    )


def test_tools_come_and_go_by_messages_of_the_system() -> None:
    def change(kind: str, **tool: Any) -> dict[str, Any]:
        return {"type": f"tool_{kind}", "tool": {"type": "tool_reference", **tool}}

    new = change("addition", type="tool_definition", definition={**SEARCH, "name": "new"})
    tools = [SEARCH, *WAITING]
    for blocks, names in (
        ([change("addition", name="second")], ["search", "second"]),
        ([change("removal", name="search")], []),
        ([change("removal", name="search"), change("addition", name="search")], ["search"]),
        ([new, change("addition", name="first")], ["search", "new", "first"]),
        ([new, change("removal", name="new")], ["search"]),
    ):
        talk = [*HELLO, {"role": "system", "content": blocks}]
        assert names_of_tools(tools=tools, messages=talk) == names
        assert messages(*talk, tools=tools) == HELLO
    told = [text("Now."), change("addition", name="second")]
    talk = [*HELLO, {"role": "system", "content": told}]
    assert messages(*talk, tools=tools) == [*HELLO, {"role": "system", "content": "Now."}]


@pytest.mark.parametrize(
    ("thinking", "thinks", "budget", "shown"),
    [
        (None, False, None, True),
        ({"type": "disabled"}, False, None, True),
        ({"type": "adaptive"}, True, None, True),
        ({"type": "enabled", "budget_tokens": 1024}, True, 1024, True),
        ({"type": "enabled", "budget_tokens": 1999, "display": "omitted"}, True, 1999, False),
        ({"type": "adaptive", "display": "summarized"}, True, None, True),
        ({"type": "adaptive", "display": "updates", "block_binding": {}}, True, None, True),
    ],
)
def test_thinking_is_asked_for_by_name(
    thinking: Any, thinks: bool, budget: int | None, shown: bool
) -> None:
    request = parsed(thinking=thinking)
    assert request.output is not None
    assert request.output.reasoning == ("apart" if thinks else "hidden")
    assert request.output.thinking_budget == budget
    assert request.shows_thinking is shown
    variables = chat(thinking=thinking)[1]
    assert variables == {"enable_thinking": thinks, "thinking": thinks}


def test_effort_and_form_of_the_answer_are_passed_on() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    config = {"effort": "high", "format": {"type": "json_schema", "schema": schema}}
    grammar = parsed(output_config=config).params.structured_outputs
    assert grammar is not None and grammar.kind == "json_schema"
    assert json.loads(grammar.source) == schema
    assert grammar.param == "output_config"
    assert chat(output_config=config)[1]["reasoning_effort"] == "high"


@pytest.mark.parametrize(
    "asked",
    [
        {"container": None, "mcp_servers": [], "speed": "standard"},
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        {"context_management": {}},
        {"cache_control": None, "service_tier": "auto", "inference_geo": "eu"},
        {"metadata": {"user_id": None}, "thinking": None, "system": None, "tools": []},
    ],
)
def test_what_asks_for_nothing_is_accepted(asked: dict[str, Any]) -> None:
    assert parsed(**asked) == parsed()


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"max_tokens": -1}, "max_tokens is -1; 0 to"),
        ({"temperature": 1.5}, "temperature is 1.5; 0 to 1 is allowed"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role is 'king'"),
        ({"messages": [user(IMAGE)]}, "content[0].type is 'image'"),
        ({"messages": [user({"type": "document", "source": {}})]}, "type is 'document'"),
        (
            {"messages": [*HELLO, assistant(CALL), user({**RESULT, "content": [
                {"type": "document", "source": {}}]})]},
            "messages[2].content[0].content[0].type is 'document'",
        ),
        ({"messages": [*HELLO, assistant(CALL), user({**RESULT, "content": [{"type": "image"}]})]},
         "source is missing with the type 'image'"),
        ({"messages": [user({"type": "text"})]}, "messages[0].content[0].text is missing"),
        ({"messages": [user(text("a", id="x"))]}, "content[0].id is not allowed in a block"),
        ({"messages": [user(CALL)]}, "not allowed in a message of the role 'user'"),
        ({"messages": [*HELLO, assistant(RESULT)]}, "of the role 'assistant'"),
        ({"messages": [*HELLO, assistant(CALL)]}, "messages[1] ends with a tool_use block"),
        (
            {"messages": [*HELLO, assistant(
                {"type": "thinking", "thinking": "cut", "signature": sign("whole")}, text("a"))]},
            "messages[1].content[0].signature is not that of the thinking",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 3}]},
         "tools[0].type is 'web_search_20250305'"),
        (
            {"tools": [SEARCH], "messages": [*HELLO, *searched("x")]},
            "messages[2].content[0].content[0].tool_name is 'x', which is none of the tools given",
        ),
        ({"messages": [*HELLO, {"role": "system", "content": [
            {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "x"}}]}]},
         "messages[1].content[0].tool.name is 'x'"),
        ({"messages": [user(
            {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "x"}})]},
         "not allowed in a message of the role 'user'"),
        ({"messages": [*HELLO, assistant(CALL), user({**RESULT, "content": [{"type": "text"}]})]},
         "text is missing with the type 'text'"),
        ({"messages": [*HELLO, {"role": "system", "content": [
            {"type": "tool_addition", "tool": {"type": "tool_definition", "name": "x"}}]}]},
         "name is not allowed with the type 'tool_definition'"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema is missing"),
        ({"tools": [WEATHER, WEATHER]}, "two of the name 'weather'"),
        ({"tool_choice": {"type": "tool", "name": "x"}, "tools": [WEATHER]}, "names 'x'"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
        ({"tool_choice": {"type": "any", "name": "x"}}, "tool_choice.name is allowed only"),
        ({"tool_choice": {"type": "any"}}, "there are no tools"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens is missing"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1000}}, "budget_tokens is 1000"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "below max_tokens, 2000"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 1024}}, "is allowed only with"),
        ({"thinking": {"type": "disabled", "display": "omitted"}}, "thinking.display"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "schema is missing"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers (call MCP servers in the client"),
        ({"container": "c"}, "container (code is not executed here)"),
        ({"thread": {"type": "create"}}, "thread (send the whole conversation"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
         "edits[0].type is \'clear_tool_uses_20250919\'"),
        ({"stop": ["a"]}, "stop (use stop_sequences)"),
        ({"metadata": {"user_id": "a\nb"}}, "printable"),
        ({"model": "nobody"}, ""),
    ],
)  # fmt: skip
def test_what_is_wrong_or_not_done_here_is_named(asked: dict[str, Any], words: str) -> None:
    if asked.get("model"):
        with pytest.raises(ApiError, match="served here: 'org/model', 'alias'") as caught:
            parsed(**asked)
        assert caught.value.status == 404
    else:
        assert words in refusal(**asked)


def test_a_foreign_signature_and_what_was_redacted_are_accepted() -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "EqQBCgIYAhIM1gbcDa9GJwZA2b3h"}
    redacted = {"type": "redacted_thinking", "data": "EmwKAhgBEgy3va3pzix"}
    found = messages(*HELLO, assistant(redacted, thought, text("a")), *HELLO)
    assert found[1] == {"role": "assistant", "content": "a", "reasoning_content": "Hm."}


def test_a_count_asks_a_tokenizer_for_the_same_prompt() -> None:
    asked = {"system": "Be.", "tools": [WEATHER], "messages": [*HELLO, assistant(text("It"))]}
    counted = CountTokensDialect().parse(json.dumps(asked).encode(), MODELS)
    answered = parsed(**asked)
    assert counted.task == "tokenize"
    assert (counted.prompts, counted.output) == (answered.prompts, answered.output)


@pytest.mark.parametrize(
    ("names", "asked", "found"),
    [
        ([("a/x", [])], "x", "a/x"),
        ([("a/x", []), ("b/y", ["b/short"])], "short", "b/y"),
        ([("a/x", []), ("b/x", [])], "x", None),
        ([("a/x", []), ("x", [])], "x", "x"),
        ([("a/b/x", ["c/x"])], "x", "a/b/x"),
    ],
)
def test_a_name_without_its_owner_is_known_where_it_is_unambiguous(
    names: list[tuple[str, list[str]]], asked: str, found: str | None
) -> None:
    models = [ServedModel(name, aliases, 64, 1000) for name, aliases in names]
    raw = json.dumps({"model": asked, "messages": HELLO}).encode()
    if found is None:
        with pytest.raises(ApiError, match="does not exist"):
            CountTokensDialect().parse(raw, models)
    else:
        request = CountTokensDialect().parse(raw, models)
        assert (request.served, request.model) == (found, asked)


def test_the_page_lists_every_field_with_what_is_allowed() -> None:
    page = (Path(__file__).parents[3] / "docs/anthropic.md").read_text()
    for name, of in fields_of(MessagesBody).items():
        assert f"| `{name}` | {describe(of)} | {description_of(of)} |\n" in page
    counted = list(fields_of(CountTokensBody))
    assert counted == list(fields_of(MessagesBody))[: len(counted)]
    assert len(counted) == 10 and "first ten fields" in page.replace("\n", " ")
