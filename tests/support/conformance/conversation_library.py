"""The same conversations through ``LLM`` and ``AsyncLLM``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from support.conformance.conversation_apis import (
    Answer,
    chat_message,
    chat_tool,
    decoded,
    finish_of,
)
from support.conformance.conversations import Conversation

from penstock import LLM, AsyncLLM, SamplingParams
from penstock.services.library.outputs import RequestOutput


class Library:
    """``LLM.chat``. Each set of tools is a call, with as many conversations as have it."""

    def ask(self, llm: LLM, conversations: Sequence[Conversation]) -> list[Answer]:
        """The answers, in order."""
        found: dict[str, Answer] = {}
        kinds = list({_offer(one): one for one in conversations}.values())
        for kind in kinds:
            alike = [one for one in conversations if _offer(one) == _offer(kind)]
            outputs = llm.chat(
                [[chat_message(turn) for turn in one.turns] for one in alike],
                [_sampling(one) for one in alike],
                tools=[chat_tool(tool) for tool in kind.tools],
                chat_template_kwargs=_variables(kind),
            )
            for one, output in zip(alike, outputs, strict=True):
                found[one.name] = _answer(output)
        return [found[conversation.name] for conversation in conversations]


class AsyncLibrary:
    """``AsyncLLM.chat``, all conversations at once."""

    async def ask(self, llm: AsyncLLM, conversations: Sequence[Conversation]) -> list[Answer]:
        """The answers, in order."""
        return list(await asyncio.gather(*(self._one(llm, each) for each in conversations)))

    async def _one(self, llm: AsyncLLM, conversation: Conversation) -> Answer:
        outputs = llm.chat(
            [chat_message(turn) for turn in conversation.turns],
            _sampling(conversation),
            tools=[chat_tool(tool) for tool in conversation.tools],
            chat_template_kwargs=_variables(conversation),
        )
        (last,) = [output async for output in outputs if output.finished]
        return _answer(last)


def _sampling(conversation: Conversation) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=conversation.max_tokens, stop=list(conversation.stop)
    )


def _variables(conversation: Conversation) -> dict[str, Any] | None:
    return None if conversation.thinks else {"enable_thinking": False}


def _answer(given: RequestOutput) -> Answer:
    (choice,) = given.outputs
    return Answer(
        choice.text,
        choice.reasoning,
        [(call.name, decoded(call.arguments)) for call in choice.tool_calls],
        finish_of(choice.finish_reason, choice.tool_calls),
        len(given.prompt_token_ids),
        len(choice.token_ids),
        None,
        [*given.prompt_token_ids, *choice.token_ids],
    )


def _offer(conversation: Conversation) -> tuple[bool, tuple[str, ...]]:
    return conversation.thinks, tuple(tool.name for tool in conversation.tools)
