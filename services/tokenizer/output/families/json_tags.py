"""JSON in tags: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``.

Hermes 2 and 3, Qwen2.5, QwQ and Qwen3; LongCat with tags of its own; InternLM 2 and Intern-S1, one
call between ``<|action_start|><|plugin|>`` and ``<|action_end|>``.
"""

from __future__ import annotations

from penstock.services.tokenizer.output.family import (
    THINK_TAGS,
    Action,
    Edge,
    Envelope,
    Expect,
    Family,
    ReasoningMarks,
)
from penstock.services.tokenizer.output.json_calls import call_headers, object_states
from penstock.services.tokenizer.output.pattern import SPACE, Mark, sequence


def _family(
    name: str,
    opening: str,
    closing: str,
    reasoning: ReasoningMarks = THINK_TAGS,
    kind: str = "",
    key: str = "arguments",
    separator: str | None = "\n",
) -> Family:
    """kind: a mark behind the opening one. key: of the arguments."""
    kinds = (Mark("kind"), SPACE) if kind else ()
    close = Mark("close")
    closed = Edge(sequence(SPACE, close), "after")
    return Family(
        name=name,
        marks={"open": opening, "close": closing} | ({"kind": kind} if kind else {}),
        openers=call_headers(Mark("open"), SPACE, *kinds),
        states={
            **object_states("object_end", (Edge(close, "after", (Action.END,)),)),
            "object_end": Expect((closed, *call_headers(SPACE)), "after"),
        },
        reasoning=reasoning,
        envelope=Envelope(
            before_name=f'{opening}{kind}\n{{"name": "',
            after_name=f'", "{key}": ',
            end="}\n" + closing,
            separator=separator,
        ),
    )


FAMILIES = (
    _family("json_tags", "<tool_call>", "</tool_call>"),
    _family(
        "json_tags_longcat",
        "<longcat_tool_call>",
        "</longcat_tool_call>",
        ReasoningMarks("<longcat_think>", "</longcat_think>"),
    ),
    _family(
        "json_tags_internlm",
        "<|action_start|>",
        "<|action_end|>",
        kind="<|plugin|>",
        key="parameters",
        separator=None,
    ),
)
