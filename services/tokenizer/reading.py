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


class Reading(NamedTuple):
    machine: Machine
    tools: ToolSchemas
    in_reasoning: bool
    """The prompt ends within thinking."""
    hides_reasoning: bool

    def parser(self, make_id: MakeId) -> OutputParser:
        """A new one, for one choice."""
        return OutputParser(self.machine, self.tools, make_id, in_reasoning=self.in_reasoning)


def call_ids(request_id: int, choice: int) -> MakeId:
    """Ids of a choice's calls: the same whichever process makes them.

    request_id: unique in the cluster.
    """

    def make(index: int, name: str) -> str:
        seed = f"{request_id}/{choice}/{index}/{name}".encode()
        return f"call_{hashlib.blake2b(seed, digest_size=12).hexdigest()}"

    return make
