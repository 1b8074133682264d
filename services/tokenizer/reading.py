"""How the outputs of a request are read, which its choices have in common."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from penstock.protocol.wire.messages.requests import OutputFormat
from penstock.services.tokenizer.output.call_ids import CallIds
from penstock.services.tokenizer.output.detection import with_reasoning
from penstock.services.tokenizer.output.families import FAMILIES
from penstock.services.tokenizer.output.family import Family
from penstock.services.tokenizer.output.machine import Machine, build_machine
from penstock.services.tokenizer.output.parser import OutputParser
from penstock.services.tokenizer.output.tool_schemas import ToolSchemas
from penstock.services.tokenizer.prompt_error import PromptError
from penstock.services.tokenizer.template_tools import DESCRIBED_FAMILY
from penstock.services.tokenizer.text_model import TextModel
from penstock.services.tokenizer.thinking import begins_in_reasoning


class Reading(NamedTuple):
    machine: Machine
    tools: ToolSchemas
    in_reasoning: bool
    """The prompt ends within thinking."""
    hides_reasoning: bool
    allowed: frozenset[str] = frozenset()
    """Names of the tools that may be called; empty: all."""
    single: bool = False
    """An answer ends with its first call."""

    def parser(self, request_id: int, choice: int) -> OutputParser:
        """A new one, for one choice. request_id: unique in the cluster."""
        make_id = CallIds(self.machine.family.ids, str(request_id), choice)
        return OutputParser(
            self.machine,
            self.tools,
            make_id,
            in_reasoning=self.in_reasoning,
            allowed=self.allowed,
            single=self.single,
        )


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
    family = family_of(text_model, output)
    tools = bool(output.tools) and output.mode != "none"
    reasoning = output.reasoning != "text" and (family.reasoning is not None or family.channels)
    if not tools and not reasoning:
        return None
    machine = build_machine(
        family,
        text_model.vocabulary,
        tools=tools,
        reasoning=reasoning,
        skips_special=skips_special,
    )
    return Reading(
        machine,
        _schemas(output.tools) if tools else ToolSchemas({}),
        begins_in_reasoning(text_model, prompt, family),
        output.reasoning == "hidden",
        frozenset(output.allowed),
        not output.parallel,
    )


def family_of(text_model: TextModel, output: OutputFormat) -> Family:
    """What the answers to a request are written in. A template that knows no tools gets them in a
    text of ours, and the calls are in the form that it names."""
    family = text_model.form.family
    if not output.tools or output.mode == "none" or text_model.tool_style.knows_tools:
        return family
    return with_reasoning(FAMILIES[DESCRIBED_FAMILY], family.reasoning)


def check_names(family: Family, output: OutputFormat) -> None:
    """Raise ``PromptError`` for a tool that the model has no way to call, because of its name."""
    if not family.no_tools or not output.tools or output.mode == "none":
        return
    taken = [one["name"] for one in _declared(output.tools) if one["name"] in family.no_tools]
    if taken:
        raise PromptError(
            f"tools: this model cannot call a tool of the name {taken[0]!r}, which says in its "
            f"form of calls ({family.name}) whom a message is for; give it another name",
            "tools",
        )


def _declared(tools: bytes) -> list[dict[str, Any]]:
    return [tool["function"] for tool in msgspec.json.decode(tools)]


def _schemas(tools: bytes) -> ToolSchemas:
    return ToolSchemas({one["name"]: one.get("parameters") for one in _declared(tools)})
