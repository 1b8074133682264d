"""Call syntax with quotes of its own: ``call:F{k:<escape>v<escape>,n:1}``.

FunctionGemma between ``<start_function_call>`` and ``<end_function_call>``; Gemma 4 between
``<|tool_call>`` and ``<tool_call|>``, with the token ``<|"|>`` as quote and thinking in a channel.
"""

from __future__ import annotations

from functools import partial

from penstock.services.tokenizer.output.call_scanner import CallScanner, Syntax
from penstock.services.tokenizer.output.family import (
    THINK_TAGS,
    Action,
    ArgumentForm,
    Edge,
    Envelope,
    Expect,
    Family,
    Literals,
    ReasoningMarks,
    Scan,
    behind_space,
)
from penstock.services.tokenizer.output.pattern import SPACE, Mark, name, sequence

_BRACES = Syntax("}", quotes='"')


def _family(
    family: str, opening: str, closing: str, quote: str, reasoning: ReasoningMarks
) -> Family:
    named = sequence("call:", SPACE, name("{}()<>,:'\"\\"), SPACE, "{")
    following = Edge(named, "call", (Action.CALL,))
    closed = Edge(Mark("close"), "after", (Action.END,))
    opener = Edge(sequence(Mark("open"), SPACE, named), "call", (Action.CALL,))
    return Family(
        name=family,
        marks={"open": opening, "close": closing, "quote": quote},
        openers=(opener,),
        states={
            "call": Scan(
                partial(CallScanner, syntax=_BRACES), "call_end", (closed,), quote=Mark("quote")
            ),
            "call_end": Expect(behind_space((closed, following)), "after", (Action.END,)),
        },
        reasoning=reasoning,
        envelope=Envelope(
            before_name=f"{opening}call:",
            after_name="{",
            end="}" + closing,
            form=ArgumentForm.LITERALS,
            separator="",
            literals=Literals(":", quote),
        ),
    )


FAMILIES = (
    _family(
        "own_quoting_functiongemma",
        "<start_function_call>",
        "<end_function_call>",
        "<escape>",
        THINK_TAGS,
    ),
    _family(
        "own_quoting_gemma4",
        "<|tool_call>",
        "<tool_call|>",
        '<|"|>',
        ReasoningMarks("<|channel>", "<channel|>", label="thought"),
    ),
)
