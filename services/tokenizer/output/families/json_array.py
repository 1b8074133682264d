"""A JSON array behind a marker: ``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``.

Mistral, whose newer models write ``[TOOL_CALLS]NAME[ARGS]{…}`` for each call; Granite 3; Command
R7B and A; Jamba; Phi-4-mini; Apertus, which writes ``{"NAME": {…}}``.
"""

from __future__ import annotations

from penstock.services.tokenizer.output.family import (
    THINK_TAGS,
    Action,
    Edge,
    Envelope,
    Expect,
    Family,
    IdStyle,
    ReasoningMarks,
    Scan,
    State,
    behind_space,
)
from penstock.services.tokenizer.output.json_calls import ARGUMENTS, call_headers, object_states
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
    spaced,
)


def _headers(
    *before: Pattern | str, named: bool, **keys: tuple[str, ...] | str
) -> tuple[Edge, ...]:
    """The edges to the arguments of an object. named: its only key is the tool's name."""
    if named:
        head = spaced(sequence(*before, "{"), sequence('"', name('"\\'), '"'), ":")
        return (Edge(head, "arguments", (Action.CALL,)),)
    return call_headers(*before, **keys)  # type: ignore[arg-type]


def _family(
    family: str,
    opening: str,
    closing: str | None,
    *,
    reasoning: ReasoningMarks = THINK_TAGS,
    named: bool = False,
    name_key: str = '"name"',
    others: tuple[str, ...] = ('"id"', '"type"'),
    keys: tuple[str, ...] = ARGUMENTS,
    marks: dict[str, str] | None = None,
    also: tuple[Edge, ...] = (),
    states: dict[str, State] | None = None,
    envelope: Envelope | None = None,
    ids: IdStyle = IdStyle.OPENAI,
    newer_mark: str = "",
) -> Family:
    """also: openers of other forms, and states: where they lead. envelope: of a newer form, in
    vocabularies that have ``newer_mark``."""
    how: dict[str, tuple[str, ...] | str] = {"name_key": name_key, "others": others, "keys": keys}
    closed = (Edge(Mark("close"), "after"),) if closing else ()
    ends = tuple(edge._replace(actions=(Action.END,)) for edge in closed)
    array_end = Edge(sequence("]"), "array_end")
    array = Envelope(
        open=opening + "[",
        before_name='{"' if named else f'{{{name_key}: "',
        after_name='": ' if named else f'", {keys[0]}: ',
        end="}",
        separator=", ",
        close="]" + (closing or ""),
    )
    following = _headers(",", SPACE, named=named, **how)
    return Family(
        name=family,
        marks={"open": opening} | ({"close": closing} if closing else {}) | (marks or {}),
        openers=(*also, *_headers(Mark("open"), SPACE, "[", SPACE, named=named, **how)),
        states={
            **object_states("object_end", ends),
            "object_end": Expect(behind_space((*following, array_end, *closed)), "after"),
            "array_end": Expect(behind_space(closed), "after"),
            **(states or {}),
        },
        reasoning=reasoning,
        ids=ids,
        envelope=envelope or array,
        older_envelope=array if newer_mark else None,
        newer_mark=newer_mark,
    )


_ID = sequence(Mark("id"), SPACE, Group("id", Characters("a-zA-Z0-9", 1, 64)), SPACE)
_MISTRAL = sequence(Mark("open"), SPACE, name("[]{}\"'<>"), SPACE, optional(_ID), Mark("args"))
_CALL = Edge(_MISTRAL, "plain", (Action.CALL,))

FAMILIES = (
    _family(
        "json_array_mistral",
        "[TOOL_CALLS]",
        None,
        reasoning=ReasoningMarks("[THINK]", "[/THINK]"),
        marks={"args": "[ARGS]", "id": "[CALL_ID]"},
        also=(_CALL,),
        states={
            "plain": Scan(JsonScanner, "plain_end"),
            "plain_end": Expect(behind_space((_CALL,)), "after", (Action.END,)),
        },
        ids=IdStyle.MISTRAL,
        envelope=Envelope("[TOOL_CALLS]", "[ARGS]", "", separator=""),
        newer_mark="[ARGS]",
    ),
    _family("json_array_granite", "<|tool_call|>", None),
    _family("json_array_granite_tag", "<tool_call>", "</tool_call>"),
    _family(
        "json_array_command",
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        reasoning=ReasoningMarks("<|START_THINKING|>", "<|END_THINKING|>"),
        name_key='"tool_name"',
        others=('"tool_call_id"',),
        keys=('"parameters"', '"arguments"'),
    ),
    _family(
        "json_array_apertus",
        "<|tools_prefix|>",
        "<|tools_suffix|>",
        reasoning=ReasoningMarks("<|inner_prefix|>", "<|inner_suffix|>"),
        named=True,
    ),
    _family("json_array_jamba", "<tool_calls>", "</tool_calls>"),
    _family("json_array_nemotron", "<TOOLCALL>", "</TOOLCALL>"),
    _family("json_array_phi4", "<|tool_call|>", "<|/tool_call|>"),
    _family("json_array_functools", "functools", None),
)
