"""Special tokens around name and JSON: DeepSeek R1, V3 and V3.1, Kimi K2.

DeepSeek V3.1: ``<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>``. Its forerunners
write ``function`` where it has the name, and the arguments in a fence behind it. Kimi K2:
``<|tool_call_begin|>functions.NAME:IDX<|tool_call_argument_begin|>{…}<|tool_call_end|>``, where all
that stands before the arguments is the call's id. All calls stand in a section.
"""

from __future__ import annotations

from penstock.services.tokenizer.output.family import (
    Action,
    Edge,
    Envelope,
    Expect,
    Family,
    IdStyle,
    Scan,
    behind_space,
)
from penstock.services.tokenizer.output.json_scanner import JsonScanner
from penstock.services.tokenizer.output.pattern import (
    SPACE,
    Characters,
    Group,
    Mark,
    Pattern,
    name,
    optional,
    sequence,
)


def _family(
    family: str,
    marks: dict[str, str],
    calls: tuple[Pattern, ...],
    envelope: Envelope,
    ids: IdStyle = IdStyle.OPENAI,
) -> Family:
    """calls: what stands from the begin of a call to its arguments, the longest form first."""
    section = optional(Mark("section"), SPACE)
    following = tuple(Edge(call, "arguments", (Action.CALL,)) for call in calls)
    call_end = Edge(Mark("call_end"), "calls", (Action.END,))
    section_end = Edge(Mark("section_end"), "after", (Action.END,))
    fence_end = Edge(sequence("```", SPACE, Mark("call_end")), "calls", (Action.END,))
    closing = section_end._replace(actions=())
    return Family(
        name=family,
        marks=marks,
        openers=tuple(edge._replace(pattern=sequence(section, edge.pattern)) for edge in following),
        states={
            "arguments": Scan(JsonScanner, "arguments_end", (call_end, section_end)),
            "arguments_end": Expect(
                behind_space((call_end, fence_end, section_end, *following)),
                otherwise="after",
                actions=(Action.END,),
            ),
            "calls": Expect(behind_space((*following, closing)), "after"),
        },
        ids=ids,
        envelope=envelope,
    )


_DEEPSEEK = {
    "section": "<｜tool▁calls▁begin｜>",
    "section_end": "<｜tool▁calls▁end｜>",
    "call": "<｜tool▁call▁begin｜>",
    "call_end": "<｜tool▁call▁end｜>",
    "separator": "<｜tool▁sep｜>",
}
_KIMI = {
    "section": "<|tool_calls_section_begin|>",
    "section_end": "<|tool_calls_section_end|>",
    "call": "<|tool_call_begin|>",
    "call_end": "<|tool_call_end|>",
    "arguments": "<|tool_call_argument_begin|>",
}
_SECTION = Envelope(
    open=_DEEPSEEK["section"],
    before_name=_DEEPSEEK["call"],
    after_name=_DEEPSEEK["separator"],
    end=_DEEPSEEK["call_end"],
    separator="",
    close=_DEEPSEEK["section_end"],
)
_NAME = name("<>`")
_FUNCTION = sequence(Mark("call"), SPACE, "function", SPACE, Mark("separator"), SPACE, _NAME)
_KIMI_NAME = sequence(optional("functions."), name("<>:"))
_WRITTEN = Group("id", sequence(_KIMI_NAME, ":", Characters("0-9", 1, 6)))

FAMILIES = (
    _family(
        "special_tokens_deepseek_v3",
        _DEEPSEEK,
        (sequence(_FUNCTION, SPACE, "```json"),),
        _SECTION._replace(
            before_name=_DEEPSEEK["call"] + "function" + _DEEPSEEK["separator"],
            after_name="\n```json\n",
            end="\n```" + _DEEPSEEK["call_end"],
            separator="\n",
        ),
    ),
    _family(
        "special_tokens_deepseek_v31",
        _DEEPSEEK,
        (sequence(Mark("call"), SPACE, _NAME, SPACE, Mark("separator")),),
        _SECTION,
    ),
    _family(
        "special_tokens_kimi",
        _KIMI,
        (
            sequence(Mark("call"), SPACE, _WRITTEN, SPACE, Mark("arguments")),
            sequence(Mark("call"), SPACE, _KIMI_NAME, SPACE, Mark("arguments")),
        ),
        Envelope(
            open=_KIMI["section"],
            before_name=_KIMI["call"] + "functions.",
            after_name=":{index}" + _KIMI["arguments"],
            end=_KIMI["call_end"],
            separator="",
            close=_KIMI["section_end"],
        ),
        IdStyle.KIMI,
    ),
)
