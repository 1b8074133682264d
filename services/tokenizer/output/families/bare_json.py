"""Bare JSON: ``{"name": …, "parameters": {…}}`` perhaps behind ``<|python_tag|>``.

Llama 3.1, 3.2 and 4; xLAM, which writes an array of such objects. Several are also parted by
semicolons. Since no mark says that a call comes, an answer is taken for one only from its first
character on, and only for the name of a tool that the request declares.
"""

from __future__ import annotations

from penstock.services.tokenizer.output.family import (
    Edge,
    Envelope,
    Expect,
    Family,
    behind_space,
)
from penstock.services.tokenizer.output.json_calls import call_headers, object_states
from penstock.services.tokenizer.output.pattern import SPACE, Mark, either, optional, sequence

_KEYS = ('"parameters"', '"arguments"')
_ARRAY = optional("[", SPACE)
_FOLLOWING = call_headers(either(";", ","), SPACE, keys=_KEYS)
_END = (Edge(sequence("]"), "after"), Edge(Mark("end"), "after"))

FAMILIES = (
    Family(
        name="bare_json",
        marks={"open": "<|python_tag|>", "end": "<|eom_id|>"},
        openers=call_headers(Mark("open"), SPACE, _ARRAY, keys=_KEYS),
        begin=call_headers(SPACE, optional(Mark("open"), SPACE), _ARRAY, keys=_KEYS),
        states={
            **object_states("object_end", ()),
            "object_end": Expect(behind_space((*_FOLLOWING, *_END)), "after"),
        },
        envelope=Envelope('{"name": "', '", "parameters": ', "}", separator="; "),
        declared_only=True,
    ),
)
