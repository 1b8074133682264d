"""Python's call syntax: ``[f(a=1), g(b='x')]``.

Llama 3.2 and 4 without any mark, or with ``<|python_start|>``; Olmo 3 one call a line in
``<function_calls>``; LFM2 between ``<|tool_call_start|>`` and ``<|tool_call_end|>``. Where no mark
says that calls come, an answer is taken for them only from its first character on, and only for the
name of a tool that the request declares.
"""

from __future__ import annotations

from penstock.services.tokenizer.output.call_scanner import CallScanner
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
    State,
    behind_space,
)
from penstock.services.tokenizer.output.pattern import (
    SPACE,
    Mark,
    Pattern,
    name,
    optional,
    sequence,
)

_NAMED = sequence(name("()[]{}<>=,;:'\"\\`"), SPACE, "(")


def _call(*before: Pattern | str, actions: tuple[Action, ...] = (Action.CALL,)) -> Edge:
    return Edge(sequence(*before, _NAMED), "call", actions)


def _states(following: Edge, *ends: Edge) -> dict[str, State]:
    """following: the edge to a further call. ends: those that end them all."""
    closing = tuple(edge._replace(actions=(Action.END,)) for edge in ends)
    broken = tuple(edge._replace(pattern=sequence(")", SPACE, edge.pattern)) for edge in closing)
    return {
        "call": Scan(CallScanner, "call_end", (*broken, *closing[1:])),
        "call_end": Expect(behind_space((following, *closing)), "after", (Action.END,)),
        "list_end": Expect(behind_space(ends[1:]), "after"),
    }


def _envelope(opening: str, separator: str, closing: str) -> Envelope:
    return Envelope(
        before_name="",
        after_name="(",
        end=")",
        form=ArgumentForm.LITERALS,
        open=opening,
        close=closing,
        separator=separator,
        literals=Literals("="),
    )


def _list(
    family: str, opening: str, closing: str, reasoning: ReasoningMarks = THINK_TAGS
) -> Family:
    """Calls in brackets behind a mark."""
    return Family(
        name=family,
        marks={"open": opening, "close": closing},
        openers=(_call(Mark("open"), SPACE, "[", SPACE),),
        states=_states(
            _call(",", SPACE), Edge(sequence("]"), "list_end"), Edge(Mark("close"), "after")
        ),
        reasoning=reasoning,
        envelope=_envelope(f"{opening}[", ", ", f"]{closing}"),
    )


_DECLARED = (Action.CALL, Action.DECLARED)

FAMILIES = (
    Family(
        name="python_calls",
        marks={"open": "<|python_start|>", "close": "<|python_end|>"},
        openers=(_call(Mark("open"), SPACE, "[", SPACE),),
        begin=(_call(SPACE, optional(Mark("open"), SPACE), "[", SPACE, actions=_DECLARED),),
        states=_states(
            _call(",", SPACE), Edge(sequence("]"), "list_end"), Edge(Mark("close"), "after")
        ),
        envelope=_envelope("[", ", ", "]"),
    ),
    Family(
        name="python_calls_lines",
        marks={"open": "<function_calls>", "close": "</function_calls>"},
        openers=(_call(Mark("open"), SPACE),),
        states=_states(_call(), Edge(Mark("close"), "after")),
        envelope=_envelope("<function_calls>\n", "\n", "\n</function_calls>"),
    ),
    _list("python_calls_lfm2", "<|tool_call_start|>", "<|tool_call_end|>"),
)
