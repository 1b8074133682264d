"""How each HTTP API says a conversation, and what it answers: one small class an API."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import aiohttp
from support.conformance.conversations import Conversation, Tool, Turn

MODEL = "penstock-demo"
TRIES = 20
"""A machine that is too busy to compile a grammar in time says so, and is asked again."""
RETRY_SECONDS = 0.5
"""After which a client asks again when its frontend has ended; so many tries outlast its start."""
AT_ONCE = 16


class Answer(NamedTuple):
    """What came of a conversation."""

    text: str
    thought: str
    calls: list[tuple[str, Any]]
    """Names, and arguments as objects, or as text where they are none."""
    finish: str
    """``stop``, ``length`` or ``tool_calls``."""
    prompt_tokens: int
    completion_tokens: int
    thought_tokens: int | None
    """``None``: the API does not say it."""
    token_ids: list[int] | None = None
    """Of prompt and answer. ``None``: the API does not say them."""


class Api(ABC):
    """An API by its name in the documentation."""

    name: ClassVar[str]
    cannot: ClassVar[Mapping[str, str]] = {}
    """Conversations that it has no way to say, or whose answer it has no way to give, and why."""
    untold: ClassVar[tuple[str, ...]] = ("token_ids",)
    """What of an answer it does not say."""

    @abstractmethod
    async def ask(self, url: str, conversations: Sequence[Conversation]) -> list[Answer]:
        """The answers, in order."""

    def told(self, answer: Answer) -> Answer:
        """The answer as far as this API tells it."""
        return answer._replace(**dict.fromkeys(self.untold))


class HttpApi(Api):
    """One request, one answer."""

    path: ClassVar[str]

    @abstractmethod
    def body(self, conversation: Conversation) -> dict[str, Any]: ...

    @abstractmethod
    def answer(self, given: Any) -> Answer: ...

    async def ask(self, url: str, conversations: Sequence[Conversation]) -> list[Answer]:
        room = asyncio.Semaphore(AT_ONCE)

        async def one(session: aiohttp.ClientSession, conversation: Conversation) -> Answer:
            body = {"model": MODEL, **self.body(conversation)}
            async with room:
                for _ in range(TRIES):
                    try:
                        async with session.post(url + self.path, json=body) as response:
                            status, given = response.status, await response.json()
                    except aiohttp.ClientConnectionError as error:  # its frontend has ended
                        status, given = 503, error
                        await asyncio.sleep(RETRY_SECONDS)
                    if status != 503:
                        break
            assert status == 200, (self.name, conversation.name, given)
            return self.answer(given)

        async with aiohttp.ClientSession() as session:
            return list(await asyncio.gather(*(one(session, each) for each in conversations)))


class ChatCompletions(HttpApi):
    """The one that says all."""

    name = "chat completions"
    untold = ()
    path = "/v1/chat/completions"

    def body(self, conversation: Conversation) -> dict[str, Any]:
        return {
            "messages": [chat_message(turn) for turn in conversation.turns],
            "tools": [chat_tool(tool) for tool in conversation.tools],
            "stop": list(conversation.stop),
            "max_completion_tokens": conversation.max_tokens,
            "temperature": 0,
            "return_token_ids": True,
            **({} if conversation.thinks else {"reasoning_effort": "none"}),
        }

    def answer(self, given: Any) -> Answer:
        (choice,) = given["choices"]
        message = choice["message"]
        calls = [one["function"] for one in message.get("tool_calls") or ()]
        return Answer(
            message["content"] or "",
            message.get("reasoning") or "",
            [(one["name"], decoded(one["arguments"])) for one in calls],
            choice["finish_reason"],
            *chat_usage(given["usage"]),
            [*given["prompt_token_ids"], *choice["token_ids"]],
        )


class Responses(HttpApi):
    name = "Responses"
    path = "/v1/responses"

    def body(self, conversation: Conversation) -> dict[str, Any]:
        first, *later = turns = list(conversation.turns)
        instructs = first.role == "system"
        return {
            **({"instructions": first.text} if instructs else {}),
            "input": [
                item for turn in (later if instructs else turns) for item in self._items(turn)
            ],
            "tools": [
                {"type": "function", "strict": False, **tool._asdict()}
                for tool in conversation.tools
            ],
            "stop": list(conversation.stop),
            "max_output_tokens": conversation.max_tokens,
            "temperature": 0,
            "store": False,
            **({} if conversation.thinks else {"reasoning": {"effort": "none"}}),
        }

    def _items(self, turn: Turn) -> list[dict[str, Any]]:
        if turn.answers:
            return [{"type": "function_call_output", "call_id": turn.answers, "output": turn.text}]
        items: list[dict[str, Any]] = []
        if turn.thought:
            content = [{"type": "reasoning_text", "text": turn.thought}]
            items.append({"type": "reasoning", "summary": [], "content": content})
        if turn.text or not turn.calls:
            kind = "output_text" if turn.role == "assistant" else "input_text"
            content = [{"type": kind, "text": turn.text}]
            items.append({"type": "message", "role": turn.role, "content": content})
        items += [
            {
                "type": "function_call",
                "call_id": call.id,
                "name": call.name,
                "arguments": json.dumps(call.arguments),
            }
            for call in turn.calls
        ]
        return items

    def answer(self, given: Any) -> Answer:
        usage, output = given["usage"], given["output"]
        calls = [item for item in output if item["type"] == "function_call"]
        return Answer(
            _texts(output, "message"),
            _texts(output, "reasoning"),
            [(one["name"], decoded(one["arguments"])) for one in calls],
            finish_of("stop" if given["status"] == "completed" else "length", calls),
            usage["input_tokens"],
            usage["output_tokens"],
            usage["output_tokens_details"]["reasoning_tokens"],
        )


class Messages(HttpApi):
    name = "Messages"
    path = "/v1/messages"

    def body(self, conversation: Conversation) -> dict[str, Any]:
        first, *later = turns = list(conversation.turns)
        messages: list[dict[str, Any]] = []
        for turn in later if first.role == "system" else turns:
            role = "user" if turn.answers else turn.role
            if messages and messages[-1]["role"] == role:
                messages[-1]["content"] += self._blocks(turn)
            else:
                messages.append({"role": role, "content": self._blocks(turn)})
        return {
            **({"system": first.text} if first.role == "system" else {}),
            "messages": messages,
            "tools": [
                {
                    "name": tool.name,
                    "description": tool.description,
                    "input_schema": tool.parameters,
                }
                for tool in conversation.tools
            ],
            "thinking": {"type": "adaptive" if conversation.thinks else "disabled"},
            "stop_sequences": list(conversation.stop),
            "max_tokens": conversation.max_tokens,
            "temperature": 0,
        }

    def _blocks(self, turn: Turn) -> list[dict[str, Any]]:
        if turn.answers:
            return [{"type": "tool_result", "tool_use_id": turn.answers, "content": turn.text}]
        blocks: list[dict[str, Any]] = []
        if turn.thought:
            blocks.append({"type": "thinking", "thinking": turn.thought, "signature": ""})
        if turn.text or not turn.calls:
            blocks.append({"type": "text", "text": turn.text})
        blocks += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}
            for call in turn.calls
        ]
        return blocks

    def answer(self, given: Any) -> Answer:
        usage = given["usage"]
        blocks = {
            kind: [block for block in given["content"] if block["type"] == kind]
            for kind in ("text", "thinking", "tool_use")
        }
        return Answer(
            "".join(block["text"] for block in blocks["text"]),
            "".join(block["thinking"] for block in blocks["thinking"]),
            [
                (block["name"], block["input"].get("INVALID_JSON", block["input"]))
                for block in blocks["tool_use"]
            ],
            {
                "end_turn": "stop",
                "stop_sequence": "stop",
                "max_tokens": "length",
                "tool_use": "tool_calls",
            }[given["stop_reason"]],
            usage["input_tokens"] + usage["cache_read_input_tokens"],
            usage["output_tokens"],
            (usage.get("output_tokens_details") or {}).get("thinking_tokens", 0),
        )


class OllamaChat(HttpApi):
    name = "Ollama's chat"
    path = "/api/chat"
    untold = ("token_ids", "thought_tokens")
    cannot: ClassVar[Mapping[str, str]] = {
        "a call that is cut": "arguments are objects: what is none comes as text"
    }

    def body(self, conversation: Conversation) -> dict[str, Any]:
        names = {call.id: call.name for turn in conversation.turns for call in turn.calls}
        return {
            "messages": [self._message(turn, names) for turn in conversation.turns],
            "tools": [chat_tool(tool) for tool in conversation.tools],
            "think": conversation.thinks,
            "stream": False,
            "options": {
                "temperature": 0,
                "num_predict": conversation.max_tokens,
                "stop": list(conversation.stop),
            },
        }

    def _message(self, turn: Turn, names: Mapping[str, str]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": turn.role, "content": turn.text}
        if turn.answers:
            message["tool_name"] = names[turn.answers]
        if turn.thought:
            message["thinking"] = turn.thought
        if turn.calls:
            message["tool_calls"] = [
                {"function": {"name": call.name, "arguments": call.arguments}}
                for call in turn.calls
            ]
        return message

    def answer(self, given: Any) -> Answer:
        message = given["message"]
        calls = [one["function"] for one in message.get("tool_calls") or ()]
        return Answer(
            message["content"],
            message.get("thinking") or "",
            [(one["name"], one["arguments"]) for one in calls],
            finish_of(given["done_reason"], calls),
            given["prompt_eval_count"],
            given["eval_count"],
            None,
        )


def chat_message(turn: Turn) -> dict[str, Any]:
    """A message of chat completions and of the library."""
    message: dict[str, Any] = {"role": turn.role, "content": turn.text}
    if turn.answers:
        message["tool_call_id"] = turn.answers
    if turn.thought:
        message["reasoning"] = turn.thought
    if turn.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for call in turn.calls
        ]
    return message


def chat_tool(tool: Tool) -> dict[str, Any]:
    """A tool of all APIs but Anthropic's and Responses."""
    return {"type": "function", "function": tool._asdict()}


def chat_usage(usage: Any) -> tuple[int, int, int]:
    """Tokens of the prompt, of the answer, and of the thinking among these."""
    details = usage.get("completion_tokens_details") or {}
    return usage["prompt_tokens"], usage["completion_tokens"], details.get("reasoning_tokens", 0)


def finish_of(finish: str, calls: Sequence[Any]) -> str:
    """``finish``, where an API says ``stop`` of calls as well."""
    return "tool_calls" if calls and finish == "stop" else finish


def decoded(arguments: str) -> Any:
    """Arguments as an object; as they stand, where they are none."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _texts(output: Sequence[Any], kind: str) -> str:
    return "".join(
        part["text"] for item in output if item["type"] == kind for part in item["content"]
    )
