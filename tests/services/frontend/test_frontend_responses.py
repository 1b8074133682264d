"""The Responses API over HTTP: bodies, prompts, events, the response, what is kept."""

from __future__ import annotations

import asyncio
import itertools
import json
import struct
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from pydantic import TypeAdapter
from support.frontend.folded_streams import response_items
from support.frontend.frontend_scripted import (
    LENGTH,
    STOP,
    Client,
    Script,
    ScriptedGateway,
    forever,
    rejected,
    run,
    say,
)

from penstock.client.sink import RowExtras, Sink
from penstock.protocol.config.server_fields import ServerConfig
from penstock.protocol.logprobs import NamedLogprobs
from penstock.protocol.wire.messages.requests import Chat, Work
from penstock.protocol.wire.messages.tokens import (
    End,
    EndReason,
    Event,
    Reasoning,
    RowDetails,
    Text,
    ToolArguments,
    ToolCallOpened,
)
from penstock.services.frontend.bodies.openai_response import (
    DeletedResponse,
    InputTokens,
    ItemList,
    ResponseEvent,
    ResponseObject,
)
from penstock.services.frontend.dialects.responses.custom_input import CustomInput
from penstock.services.frontend.dialects.unseen import IMAGE

PATH = "/v1/responses"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "weather", "parameters": {"type": "object"}},
    {
        "type": "namespace",
        "name": "files",
        "description": "Files.",
        "tools": [
            {"type": "custom", "name": "patch", "description": "Apply a patch."},
            {"type": "function", "name": "list"},
        ],
    },
]
ROWS: list[list[Event] | str] = [
    [Reasoning("Let me ")],
    [Reasoning("think.\u2028")],
    "Hel",
    "",
    "lo 😀",
    [ToolCallOpened(0, "call_1", "weather")],
    [ToolArguments(0, '{"city": ')],
    [ToolArguments(0, '"Rome"}'), ToolCallOpened(1, "call_2", "files__patch")],
    [ToolArguments(1, '{"input": "a\\')],
    [ToolArguments(1, 'nb"}'), ToolCallOpened(2, "call_3", "nobody")],
    [ToolArguments(2, "{}")],
]
ENDED = End(0, EndReason.STOP, reasoning_tokens=2)


def rows(*content: list[Event] | str, end: End = STOP, rest_s: float = 0.0) -> Script:
    async def script(work: Work, sink: Sink) -> None:
        sink.on_accepted(5)
        for one in content:
            await asyncio.sleep(rest_s)
            if isinstance(one, str):
                sink.on_row(0, one, 1)
            else:
                sink.on_row(0, "", 1, RowExtras(events=one))
        sink.on_row(0, "", 1, RowExtras(end=end))

    return script


async def whole(client: Client, **body: Any) -> dict[str, Any]:
    status, response, _ = await client.post(PATH, body)
    assert status == 200, response
    Response.model_validate(response, strict=True)
    msgspec.convert(response, ResponseObject)
    return response


async def streamed(client: Client, **body: Any) -> list[dict[str, Any]]:
    """All events of a stream, each as the SDK's types and ours demand it."""
    data = json.dumps({**body, "stream": True}).encode()
    async with client.session.post(client.url + PATH, data=data) as response:
        raw = await response.text()
        assert response.status == 200, raw
    found = []
    for block in raw.removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            continue
        kind, line = block.splitlines()
        event = json.loads(line.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        EVENT.validate_python(event)
        msgspec.convert(event, ResponseEvent)
        found.append(event)
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    return found


async def refusal(client: Client, status: int = 400, **body: Any) -> dict[str, Any]:
    given, answer, _ = await client.post(PATH, body)
    assert given == status, answer
    found: dict[str, Any] = answer["error"]
    return found


def messages(work: Work) -> list[dict[str, Any]]:
    assert isinstance(work.prompt, Chat)
    found: list[dict[str, Any]] = json.loads(work.prompt.messages)
    return found


def neutral(response: dict[str, Any]) -> Any:
    """Without what differs between two answers to the same request."""
    own = response["id"].removeprefix("resp_")
    shown = json.loads(json.dumps(response).replace(own, "ID"))
    return {**shown, "created_at": 0, "completed_at": 0}


# --- answers


@pytest.mark.parametrize("rest_s", [0.0, 0.003], ids=["at once", "row by row"])
@pytest.mark.parametrize(
    "asks",
    [
        {},
        {"reasoning": {"effort": "low", "summary": "auto"}},
        {"include": ["reasoning.encrypted_content"], "store": False},
    ],
)
def test_the_events_of_a_stream_add_up_to_the_unstreamed_response(
    asks: dict[str, Any], rest_s: float
) -> None:
    async def use(client: Client) -> None:
        body = {"input": "hi", "tools": TOOLS, "metadata": {"a": "b"}, **asks}
        response = await whole(client, **body)
        events = await streamed(client, **body)
        assert events[-1]["type"] == "response.completed"
        assert neutral(events[-1]["response"]) == neutral(response)
        done = [one["item"] for one in events if one["type"] == "response.output_item.done"]
        assert done == events[-1]["response"]["output"]
        for item, made in zip(done, response_items(events), strict=True):
            item.pop("encrypted_content", None)
            assert {**made, "status": "completed"} == item

    run(use, rows(*ROWS, end=ENDED, rest_s=rest_s))


def test_events_come_in_the_order_that_clients_demand() -> None:
    async def use(client: Client) -> None:
        events = await streamed(client, input="hi", tools=TOOLS)
        kinds = [kind for kind, _ in itertools.groupby(one["type"] for one in events)]
        thinking = ["reasoning_text.delta", "reasoning_text.done", "content_part.done"]
        message = ["output_text.delta", "output_text.done", "content_part.done"]
        call = ["function_call_arguments.delta", "function_call_arguments.done"]
        custom = ["custom_tool_call_input.delta", "custom_tool_call_input.done"]
        item, done = "output_item.added", "output_item.done"
        expected = ["created", "in_progress", item, "content_part.added", *thinking, done]
        expected += [item, "content_part.added", *message, done, item, *call, done]
        expected += [item, *custom, done, item, *call, done, "completed"]
        assert kinds == [f"response.{one}" for one in expected]
        items = events[-1]["response"]["output"]
        assert [one["type"] for one in items] == [
            "reasoning",
            "message",
            "function_call",
            "custom_tool_call",
            "function_call",
        ]
        assert (items[3]["namespace"], items[3]["name"]) == ("files", "patch")
        assert items[3]["input"] == "a\nb" and items[3]["call_id"] == "call_2"
        usage = events[-1]["response"]["usage"]
        assert usage["output_tokens_details"] == {"reasoning_tokens": 2}
        assert (usage["input_tokens"], usage["output_tokens"]) == (5, 12)

    run(use, rows(*ROWS, end=ENDED))


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut_is_incomplete(stream: bool) -> None:
    async def use(client: Client) -> None:
        if stream:
            last = (await streamed(client, input="x", max_output_tokens=2))[-1]
            assert last["type"] == "response.incomplete"
            response = last["response"]
        else:
            response = await whole(client, input="x", max_output_tokens=2)
        assert response["status"] == "incomplete" and response["completed_at"] is None
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["output"][0]["status"] == "incomplete"

    gateway = run(use, rows("a", "b", end=LENGTH))
    assert gateway.works[0].params.max_tokens == 2


def test_an_answer_without_a_token_is_an_empty_message() -> None:
    async def use(client: Client) -> None:
        (item,) = (await whole(client, input="x"))["output"]
        assert item["content"] == [
            {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        ]

    run(use, rows())


def test_an_error_before_the_answer_is_a_status_and_one_within_it_ends_the_stream() -> None:
    async def script(work: Work, sink: Sink) -> None:
        if work.params.max_tokens == 1:
            sink.on_rejected(rejected(503, "full", kind="overloaded_error"))
            return
        sink.on_accepted(1)
        sink.on_row(0, "begun", 1)
        await asyncio.sleep(0.01)
        sink.on_rejected(rejected(500, "engine lost", kind="server_error"))

    async def use(client: Client) -> None:
        assert (await refusal(client, 503, input="x", max_output_tokens=1))["message"] == "full"
        *_, error, failed = await streamed(client, input="x")
        assert (error["type"], error["message"]) == ("error", "engine lost")
        assert failed["type"] == "response.failed"
        assert failed["response"]["error"] == {"code": "server_error", "message": "engine lost"}
        assert failed["response"]["output"][0]["status"] == "incomplete"
        assert (await refusal(client, 500, input="x"))["message"] == "engine lost"
        status, _, _ = await client.get(f"{PATH}/{failed['response']['id']}")
        assert status == 404

    run(use, script)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_those_of_the_text(stream: bool) -> None:
    def named(piece: str) -> NamedLogprobs:
        entry = struct.pack("<iif1i1f", 1, 1, -0.5, 3, -1.25)
        return NamedLogprobs(1, entry, [piece.encode(), b"?"], [0])

    async def script(work: Work, sink: Sink) -> None:
        assert work.params.logprobs == 1
        sink.on_accepted(1)
        for event in (Reasoning("hm"), Text("a")):
            details = RowDetails(0, named(event.text))
            sink.on_row(0, "", 1, RowExtras(details=details, events=[event]))
        sink.on_row(0, "", 1, RowExtras(details=RowDetails(0, named("b"))))
        sink.on_row(0, "bc", 1, RowExtras(details=RowDetails(0, named("c"))))
        sink.on_row(0, "", 1, RowExtras(end=STOP))

    async def use(client: Client) -> None:
        body = {"input": "x", "top_logprobs": 1, "include": ["message.output_text.logprobs"]}
        if stream:
            events = await streamed(client, **body)
            response = events[-1]["response"]
            assert response_items(events)[1]["content"] == response["output"][1]["content"]
        else:
            response = await whole(client, **body)
        (part,) = response["output"][1]["content"]
        assert part["text"] == "abc"
        assert [one["token"] for one in part["logprobs"]] == ["a", "b", "c"]
        assert part["logprobs"][0]["top_logprobs"][0]["token"] == "?"

    run(use, script)


# --- prompts


def test_items_become_the_messages_of_a_chat() -> None:
    items: list[dict[str, Any]] = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "content": "one"},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
        },
        {
            "type": "function_call",
            "call_id": "c1",
            "name": "list",
            "namespace": "files",
            "arguments": "{}",
        },
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "a\nb"},
        {"type": "function_call_output", "call_id": "c1", "output": "none"},
        {
            "type": "custom_tool_call_output",
            "call_id": "c2",
            "output": [
                {"type": "input_text", "text": "x"},
                {
                    "type": "input_image",
                    "image_url": "data:image/png;base64,AA==",
                    "detail": "high",
                },
            ],
        },
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]},
        {"role": "assistant", "content": "Done."},
        {"role": "assistant", "content": "Really."},
    ]

    async def use(client: Client) -> None:
        await whole(client, input=items, instructions="You help.", tools=TOOLS)

    (work,) = run(use).works
    calls = [
        {"id": "c1", "function": {"name": "files__list", "arguments": "{}"}},
        {"id": "c2", "function": {"name": "patch", "arguments": '{"input":"a\\nb"}'}},
    ]
    assert messages(work) == [
        {"role": "system", "content": "You help.\n\nBe brief."},
        {"role": "user", "content": "one"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": calls,
        },
        {"role": "tool", "content": "none", "name": "files__list", "tool_call_id": "c1"},
        {"role": "tool", "content": f"x\n{IMAGE}", "name": "patch", "tool_call_id": "c2"},
        {"role": "assistant", "content": "Done.", "reasoning_content": "so"},
        {"role": "assistant", "content": "Really."},
    ]


def test_tools_become_functions_and_choices_name_them() -> None:
    regex = {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"}
    lark = {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}
    tools: list[dict[str, Any]] = [
        {"type": "function", "name": "f", "strict": True, "parameters": {"type": "object"}},
        {"type": "custom", "name": "word", "format": regex},
        {"type": "custom", "name": "x", "description": "Says x.", "format": lark},
        {"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "f"}]},
    ]

    async def use(client: Client) -> None:
        for choice in (
            None,
            "required",
            {"type": "custom", "name": "word"},
            {"type": "function", "name": "f", "namespace": "ns"},
            {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "f"}, {"type": "custom", "name": "x"}],
            },
        ):
            await whole(
                client, input="x", tools=tools, tool_choice=choice, parallel_tool_calls=False
            )

    outputs = [work.output for work in run(use).works]
    assert all(one is not None and not one.parallel for one in outputs)
    chosen = [(one.mode, one.allowed) for one in outputs if one is not None]
    assert chosen == [
        ("auto", []),
        ("required", []),
        ("required", ["word"]),
        ("required", ["ns__f"]),
        ("auto", ["f", "x"]),
    ]
    assert outputs[0] is not None and outputs[0].strict == ["f", "word"]
    functions = [one["function"] for one in json.loads(outputs[0].tools)]
    assert [one["name"] for one in functions] == ["f", "word", "x", "ns__f"]
    assert functions[1]["parameters"]["properties"]["input"]["pattern"] == "^(?:[a-z]+)$"
    assert functions[2]["description"].startswith("Says x.\n\n") and "/x/" in str(functions[2])


def test_parameters_reach_the_pipeline() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    format = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}

    async def use(client: Client) -> None:
        response = await whole(
            client,
            model="alias",
            input="x",
            temperature=0.5,
            top_p=0.9,
            top_k=7,
            seed=3,
            stop="##",
            text={"format": format, "verbosity": "medium"},
            reasoning={"effort": "none"},
            user="me",
            prompt_cache_key="k",
            service_tier="auto",
            client_metadata={"session": "1"},
            truncation="disabled",
            background=False,
        )
        assert response["model"] == "alias" and response["temperature"] == 0.5
        assert response["text"]["format"]["schema"] == schema
        assert (response["user"], response["prompt_cache_key"]) == ("me", "k")

    (work,) = run(use).works
    params = work.params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.5, 0.9, 7, 3)
    assert params.stop == ["##"] and params.max_tokens is None
    assert params.structured_outputs is not None
    assert json.loads(params.structured_outputs.source) == schema
    assert isinstance(work.prompt, Chat)
    variables = json.loads(work.prompt.template_kwargs)
    assert variables == {"enable_thinking": False, "thinking": False}
    assert work.head.tenant == "me"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "input is missing"),
        ({"input": []}, "input is missing"),
        ({"input": [3]}, "input[0] is 3"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type is 'web_search_call'"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name is missing"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type is 'input_image'",
        ),
        (
            {
                "input": [
                    {
                        "type": "function_call_output",
                        "call_id": "c",
                        "output": [{"type": "input_image", "text": "x"}],
                    }
                ]
            },
            "text is not allowed with the type 'input_image'",
        ),
        (
            {"input": [{"type": "reasoning", "encrypted_content": "gAAA"}]},
            "input[0].encrypted_content was not made by this server",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type is 'web_search'"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name is 'a b'"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "two of the name 'weather'"),
        (
            {"tools": [{"type": "custom", "name": "c", "format": {"type": "grammar"}}]},
            "tools[0].format.syntax is missing",
        ),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "none of the tools given"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type is 'file_search'"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name is missing"),
        ({"text": {"verbosity": "low"}}, "not supported yet in text: verbosity"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema is miss"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort is 'huge'"),
        ({"background": True}, "not supported yet: background"),
        ({"truncation": "some"}, "truncation is 'some'"),
        ({"conversation": "c"}, "not supported yet: conversation"),
        ({"max_tokens": 5}, "use max_output_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens is 0"),
        ({"messages": []}, "use input"),
        ({"temperature": 200}, "temperature is 200"),
        ({"metadata": {"k": "v" * 600}}, "at most 512"),
        ({"include": ["everything"]}, "include[0] is 'everything'"),
        ({"top_logprobs": 21}, "top_logprobs is 21"),
        ({"previous_response_id": "resp_../../x"}, "not found"),
        ({"input": [{"type": "item_reference", "id": "msg_x"}]}, "not found"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(body: dict[str, Any], words: str) -> None:
    async def use(client: Client) -> None:
        given = body if "input" in body or not body else {"input": "x", **body}
        status = 404 if "item_reference" in str(body) else 400
        assert words in (await refusal(client, status, **given))["message"]

    assert run(use).works == []


# --- what is kept


def test_a_response_is_continued_shown_listed_and_deleted() -> None:
    async def use(client: Client) -> None:
        first = await whole(client, input="one", tools=TOOLS)
        outputs = [
            {"type": "function_call_output", "call_id": "call_1", "output": "warm"},
            {"type": "custom_tool_call_output", "call_id": "call_2", "output": "ok"},
            {"type": "item_reference", "id": first["output"][1]["id"]},
        ]
        second = await whole(client, input=outputs, previous_response_id=first["id"])
        said = messages(client.gateway.works[1])
        assert [one["role"] for one in said] == ["user", "assistant", "tool", "tool", "assistant"]
        assert said[1]["reasoning_content"] == "Let me think.\u2028"
        assert [one["id"] for one in said[1]["tool_calls"]] == ["call_1", "call_2", "call_3"]
        assert said[1]["tool_calls"][1]["function"]["name"] == "files__patch"
        assert said[4]["content"] == "Hello 😀"
        where = f"{PATH}/{second['id']}"
        assert (await client.get(where))[1] == second
        _, listed, _ = await client.get(f"{where}/input_items?order=asc&limit=100")
        msgspec.convert(listed, ItemList)
        ResponseItemList.model_validate(listed)
        kinds = [one["type"] for one in listed["data"]]
        assert kinds[0] == "message" and kinds[-2] == "custom_tool_call_output"
        assert len(kinds) == 1 + 5 + 3 and not listed["has_more"]
        _, page, _ = await client.get(f"{where}/input_items?limit=2")
        assert page["data"] == listed["data"][:-3:-1] and page["has_more"]
        _, page, _ = await client.get(f"{where}/input_items?after={page['last_id']}")
        assert page["first_id"] == listed["data"][-3]["id"]
        async with client.session.delete(client.url + where) as answer:
            msgspec.json.decode(await answer.read(), type=DeletedResponse)
        for path in (where, f"{where}/input_items"):
            assert (await client.get(path))[0] == 404

    run(use, rows(*ROWS, end=ENDED))


def test_thinking_that_is_given_back_sealed_is_read() -> None:
    async def use(client: Client) -> None:
        response = await whole(
            client, input="x", include=["reasoning.encrypted_content"], store=False
        )
        sealed = {
            "type": "reasoning",
            "summary": [],
            "encrypted_content": response["output"][0]["encrypted_content"],
        }
        await whole(client, input=[{"role": "user", "content": "x"}, sealed])
        assert messages(client.gateway.works[1])[1]["reasoning_content"] == "Let me think.\u2028"

    run(use, rows(*ROWS, end=ENDED))


def test_a_response_of_another_key_is_not_there() -> None:
    async def use(client: Client) -> None:
        keys = [{"Authorization": f"Bearer {key}"} for key in ("one", "two")]
        _, mine, _ = await client.post(PATH, {"input": "x"}, headers=keys[0])
        for headers, status in zip(keys, (200, 404), strict=True):
            assert (await client.get(f"{PATH}/{mine['id']}", headers=headers))[0] == status
        body = {"input": "x", "previous_response_id": mine["id"]}
        status, error, _ = await client.post(PATH, body, headers=keys[1])
        assert (status, error["error"]["code"]) == (400, "previous_response_not_found")
        status, _, _ = await client.post(f"{PATH}/{mine['id']}/cancel", {}, headers=keys[1])
        assert status == 404

    run(use, config=ServerConfig(api_key=["one", "two"]))


def test_without_a_store_it_is_said_what_to_do() -> None:
    async def use(client: Client) -> None:
        assert (await whole(client, input="x"))["store"] is False
        assert "--response-store off" in (await refusal(client, input="x", store=True))["message"]
        error = await refusal(client, input="x", previous_response_id=f"resp_{'0' * 32}")
        assert "send the whole conversation as input" in error["message"]
        status, error, _ = await client.get(f"{PATH}/resp_{'0' * 32}")
        assert status == 400 and "--response-store off" in error["error"]["message"]

    run(use, config=ServerConfig(response_store="off"))


def test_a_folder_shares_responses_between_frontends(tmp_path: Path) -> None:
    config = ServerConfig(response_store=str(tmp_path / "kept"))
    found: list[dict[str, Any]] = []

    async def first(client: Client) -> None:
        found.append(await whole(client, input="one"))

    async def second(client: Client) -> None:
        assert (await client.get(f"{PATH}/{found[0]['id']}"))[1] == found[0]
        await whole(client, input="two", previous_response_id=found[0]["id"])

    run(first, config=config)
    (work,) = run(second, config=config).works
    assert [one["content"] for one in messages(work)] == ["one", "Hello world", "two"]


def test_a_running_response_is_shown_and_cancelled() -> None:
    async def use(client: Client) -> None:
        body = json.dumps({"input": "x", "stream": True})
        async with client.session.post(client.url + PATH, data=body) as response:
            line = await response.content.readline()
            line = await response.content.readline()
            name = json.loads(line.removeprefix(b"data: "))["response"]["id"]
            where = f"{PATH}/{name}"
            assert (await client.get(where))[1]["status"] == "in_progress"
            status, cancelled, _ = await client.post(f"{where}/cancel", {})
            assert (status, cancelled["status"]) == (200, "cancelled")
            raw = await response.read()
        last = json.loads(raw.strip().split(b"\n")[-1].removeprefix(b"data: "))
        assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")
        assert (await client.get(where))[1]["status"] == "cancelled"
        status, error, _ = await client.post(f"{where}/cancel", {})
        assert status == 400 and "has ended (cancelled)" in error["error"]["message"]

    assert run(use, forever).cancelled == [1]


def test_the_tokens_of_an_input_are_counted() -> None:
    async def use(client: Client) -> None:
        body = {"input": "x", "tools": TOOLS, "instructions": "y"}
        status, counted, _ = await client.post(f"{PATH}/input_tokens", body)
        assert (status, msgspec.convert(counted, InputTokens).input_tokens) == (200, 3)
        status, error, _ = await client.post(f"{PATH}/input_tokens", {"input": "x", "stream": True})
        assert status == 400 and "stream" in error["error"]["message"]

    (work,) = run(use).works
    assert work.head.task == "tokenize" and len(messages(work)) == 2


# --- the input of custom tools


def test_the_input_of_a_custom_tool_is_the_same_at_every_split() -> None:
    wanted = 'a"b\\c\n\\\\u12 😀é\u2028 \\"end\\'
    for is_ascii in (True, False):
        arguments = json.dumps({"input": wanted}, ensure_ascii=is_ascii)
        for first, second in itertools.combinations_with_replacement(range(len(arguments)), 2):
            given = CustomInput()
            parts = (arguments[:first], arguments[first:second], arguments[second:])
            assert "".join(map(given.feed, parts)) + given.end() == wanted == given.whole


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ("plain text", "plain text"),
        ('"a string"', "a string"),
        ('{"other": 1, "input": "x"}', "x"),
        ('{"patch": "x"}', '{"patch": "x"}'),
        ("", ""),
        ('{"input": "cut', "cut"),
        ('{"input": "\\ud83d"}', "\ufffd"),
        ('{"input": "a\\qb"}', "a\\qb"),
    ],
)
def test_an_input_in_another_form_is_given_as_it_is(arguments: str, wanted: str) -> None:
    given = CustomInput()
    parts = [given.feed(one) for one in arguments]
    assert "".join(parts) + given.end() == wanted


# --- the SDK


def test_the_sdk_creates_streams_continues_and_deletes() -> None:
    async def use(client: Client) -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{client.url}/v1", api_key="none", max_retries=0
        ) as api:
            first = await api.responses.create(model="org/model", input="hi")
            assert first.output_text == "Hello world"
            async with api.responses.stream(
                model="org/model", input="and?", previous_response_id=first.id
            ) as stream:
                kinds = [event.type async for event in stream]
                last = await stream.get_final_response()
            assert kinds[-1] == "response.completed" and last.output_text == "Hello world"
            assert (await api.responses.retrieve(last.id)).id == last.id
            items = [item async for item in api.responses.input_items.list(last.id)]
            assert len(items) == 3
            counted = await api.responses.input_tokens.count(model="org/model", input="x")
            assert counted.input_tokens == 3
            await api.responses.delete(last.id)
            with pytest.raises(openai.NotFoundError):
                await api.responses.retrieve(last.id)
            with pytest.raises(openai.BadRequestError) as bad:
                await api.responses.create(model="org/model", input="x", background=True)
            assert bad.value.param == "background"

    gateway: ScriptedGateway = run(use, say("Hello", " world"))
    assert len(gateway.works) == 3
