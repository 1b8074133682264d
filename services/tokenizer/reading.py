"""How the outputs of a request are read, which its choices have in common."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import msgspec

from penstock.protocol.wire.messages.requests import OutputFormat
from penstock.services.tokenizer.output.machine import Machine, build_machine
from penstock.services.tokenizer.output.parser import MakeId, OutputParser
from penstock.services.tokenizer.output.tool_schemas import ToolSchemas
from penstock.services.tokenizer.text_model import TextModel
from penstock.services.tokenizer.thinking import thinking


class Reading(NamedTuple):
    machine: Machine
    tools: ToolSchemas
    in_reasoning: bool
    """The prompt ends within thinking."""
    hides_reasoning: bool

    def parser(self, make_id: MakeId) -> OutputParser:
        """A new one, for one choice."""
        return OutputParser(self.machine, self.tools, make_id, in_reasoning=self.in_reasoning)


def reading_of(
    text_model: TextModel, output: OutputFormat | None, prompt: bytes, *, skips_special: bool
) -> Reading | None:
    """How the answers to a prompt are read; ``None``: as text alone.

    Args:
        prompt: int32 token ids, little endian. Nothing else is known of it: a continuation gets
            the same answer.
        skips_special: special tokens stand for nothing.
    """
    if output is None:
        return None
    tools = bool(output.tools) and output.mode != "none"
    reasoning = output.reasoning != "text" and text_model.thinks
    if not tools and not reasoning:
        return None
    machine = build_machine(
        text_model.family,
        text_model.vocabulary,
        tools=tools,
        reasoning=reasoning,
        skips_special=skips_special,
    )
    thought = thinking(text_model, prompt)
    return Reading(
        machine,
        _schemas(output.tools) if tools else ToolSchemas({}),
        reasoning and bool(thought.start_after) and not thought.may_open,
        output.reasoning == "hidden",
    )


def _schemas(tools: bytes) -> ToolSchemas:
    declared = [tool["function"] for tool in msgspec.json.decode(tools)]
    return ToolSchemas({one["name"]: one.get("parameters") for one in declared})


def call_ids(request_id: int, choice: int) -> MakeId:
    """Ids of a choice's calls: the same whichever process makes them.

    request_id: unique in the cluster.
    """

    def make(index: int, name: str) -> str:
        seed = f"{request_id}/{choice}/{index}/{name}".encode()
        return f"call_{hashlib.blake2b(seed, digest_size=12).hexdigest()}"

    return make
