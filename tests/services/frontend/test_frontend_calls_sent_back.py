"""What a model has called can be sent back, as many calls as one answer may hold."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.frontend.frontend_scripted import Client, run
from support.frontend.tokenized_script import writes

from penstock.protocol.wire.messages.requests import Chat
from penstock.protocol.wire.messages.tokens import MAX_CALLS

SCHEMA = {"type": "object"}
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
ASKED = {"role": "user", "content": "x"}
FUNCTION = {"type": "function", "function": {"name": "now", "parameters": SCHEMA}}


async def post(client: Client, path: str, **body: Any) -> Any:
    status, answer, _ = await client.post(path, {"stream": False, **body})
    assert status == 200, answer
    return answer


async def chat(client: Client) -> None:
    path, tools = "/v1/chat/completions", [FUNCTION]
    answer = await post(client, path, messages=[ASKED], tools=tools)
    said = answer["choices"][0]["message"]
    results = [
        {"role": "tool", "tool_call_id": one["id"], "content": "1"} for one in said["tool_calls"]
    ]
    await post(client, path, messages=[ASKED, said, *results], tools=tools)


async def responses(client: Client) -> None:
    path, tools = "/v1/responses", [{"type": "function", "name": "now", "parameters": SCHEMA}]
    answer = await post(client, path, input="x", tools=tools)
    results = [
        {"type": "function_call_output", "call_id": one["call_id"], "output": "1"}
        for one in answer["output"]
        if one["type"] == "function_call"
    ]
    body = {"input": results, "tools": tools, "previous_response_id": answer["id"]}
    await post(client, path, **body)


async def anthropic(client: Client) -> None:
    path, tools = "/v1/messages", [{"name": "now", "input_schema": SCHEMA}]
    body = {"model": "org/model", "max_tokens": 9, "tools": tools}
    answer = await post(client, path, messages=[ASKED], **body)
    results: list[dict[str, Any]] = [
        {"type": "tool_result", "tool_use_id": one["id"], "content": "1"}
        for one in answer["content"]
        if one["type"] == "tool_use"
    ]
    said = {"role": "assistant", "content": answer["content"]}
    heard = {"role": "user", "content": [*results, {"type": "text", "text": "And?"}]}
    await post(client, path, messages=[ASKED, said, heard], **body)


async def ollama(client: Client) -> None:
    path, body = "/api/chat", {"model": "org/model", "tools": [FUNCTION]}
    said = (await post(client, path, messages=[ASKED], **body))["message"]
    results = [{"role": "tool", "content": "1"} for _ in said["tool_calls"]]
    await post(client, path, messages=[ASKED, said, *results], **body)


@pytest.mark.parametrize("talk", [chat, responses, anthropic, ollama])
def test_all_calls_of_an_answer_can_be_sent_back_with_their_results(talk: Any) -> None:
    written = "I look.\n" + f"{CALL}\n" * (MAX_CALLS + 2)
    gateway = run(talk, writes(written, row=4096))
    prompt = gateway.works[1].prompt
    assert isinstance(prompt, Chat)
    messages = msgspec.json.decode(prompt.messages)
    called = [call for one in messages for call in one.get("tool_calls") or ()]
    assert len(called) == MAX_CALLS
    assert sum(one["role"] == "tool" for one in messages) == MAX_CALLS
