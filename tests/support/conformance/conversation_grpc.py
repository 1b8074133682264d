"""The conversations over gRPC."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import grpc
from support.conformance.conversation_apis import MODEL, Answer, decoded
from support.conformance.conversations import Conversation, Turn
from support.pipeline.grpc_client import Gathered, gathered, stub_of

from penstock.protocol.grpc import penstock_pb2 as pb


class Grpc:
    """A stream for each, all at once."""

    def ask(self, address: str, conversations: Sequence[Conversation]) -> list[Answer]:
        return asyncio.run(self._ask(address, conversations))

    async def _ask(self, address: str, conversations: Sequence[Conversation]) -> list[Answer]:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = stub_of(channel)

            async def one(conversation: Conversation) -> Answer:
                messages = [message async for message in stub.Chat(self.request(conversation))]
                return self.answer(gathered(messages))

            return list(await asyncio.gather(*map(one, conversations)))

    def request(self, conversation: Conversation) -> pb.ChatRequest:
        return pb.ChatRequest(
            model=MODEL,
            messages=[_message(turn) for turn in conversation.turns],
            tools=[
                pb.Tool(
                    name=tool.name,
                    description=tool.description,
                    parameters=json.dumps(tool.parameters),
                )
                for tool in conversation.tools
            ],
            sampling=pb.Sampling(
                temperature=0, max_tokens=conversation.max_tokens, stop=conversation.stop
            ),
            options=pb.Options(return_token_ids=True),
            **({} if conversation.thinks else {"reasoning_effort": "none"}),
        )

    def answer(self, found: Gathered) -> Answer:
        usage = found.usage
        return Answer(
            found.texts[0],
            found.thoughts[0],
            [(name, decoded(arguments)) for _, name, arguments in found.calls[0].values()],
            found.finishes[0].lower(),
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.reasoning_tokens,
            [*found.prompt_token_ids, *found.token_ids[0]],
        )


def _message(turn: Turn) -> pb.Message:
    fields: dict[str, Any] = {"role": turn.role, "content": turn.text}
    if turn.answers:
        fields["tool_call_id"] = turn.answers
    if turn.thought:
        fields["reasoning"] = turn.thought
    calls = [
        pb.ToolCall(id=call.id, name=call.name, arguments=json.dumps(call.arguments))
        for call in turn.calls
    ]
    return pb.Message(**fields, tool_calls=calls)
