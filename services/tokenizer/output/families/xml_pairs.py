"""XML pairs: ``<tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value></tool_call>``.

GLM-4.5 and later, Ling 3, Laguna; Hunyuan with ``<tool_sep>`` behind the name and all calls in
``<tool_calls>``.
"""

from __future__ import annotations

from penstock.services.tokenizer.output.family import (
    Action,
    ArgumentForm,
    Channel,
    Edge,
    Envelope,
    Expect,
    Family,
    Free,
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

_MARKS = {
    "open": "<tool_call>",
    "close": "</tool_call>",
    "key": "<arg_key>",
    "key_end": "</arg_key>",
    "value": "<arg_value>",
    "value_end": "</arg_value>",
}
_OPEN, _CLOSE, _KEY = Mark("open"), Mark("close"), Mark("key")
_NAMED = sequence(_OPEN, SPACE, name("<>{}\"'"), SPACE)


def _openers(named: Pattern, after: str) -> tuple[Edge, ...]:
    return (
        Edge(sequence(named, _KEY), "key", (Action.CALL,)),
        Edge(sequence(named, _CLOSE), after, (Action.CALL, Action.END)),
    )


def _family(family: str, openers: tuple[Edge, ...], following: tuple[Edge, ...],
            marks: dict[str, str], after: str, envelope: Envelope) -> Family:  # fmt: skip
    """openers: of the first call; following: of others. after: the state behind a call."""
    key_end = sequence(SPACE, name("<>", "key"), SPACE, Mark("key_end"), SPACE, Mark("value"))
    ends = (Edge(_KEY, "key", (Action.VALUE_END,)), Edge(_CLOSE, after, (Action.END,)))
    closing = Edge(sequence(SPACE, Mark("calls_end")), "after")
    return Family(
        name=family,
        marks=_MARKS | marks,
        openers=openers,
        states={
            "key": Expect(
                (Edge(key_end, "value", (Action.KEY,)),), otherwise="after", actions=(Action.END,)
            ),
            "value": Free(
                Channel.VALUE,
                (Edge(Mark("value_end"), "pairs", (Action.VALUE_END,)), *ends),
            ),
            "pairs": Expect(
                (*behind_space(ends), *behind_space(following)),
                otherwise="after",
                actions=(Action.END,),
            ),
            "calls": Expect((*behind_space(following), *((closing,) if marks else ())), "after"),
        },
        envelope=envelope,
    )


_PAIRS = Envelope(
    before_name="<tool_call>",
    after_name="\n",
    end="</tool_call>",
    form=ArgumentForm.PARAMETERS,
    before_value="<arg_key>{key}</arg_key>\n<arg_value>",
    after_value="</arg_value>\n",
    value_excludes="</arg_value>",
)
_SEPARATED = sequence(_NAMED, Mark("separator"), SPACE)
_CALLS = sequence(optional(Mark("calls"), SPACE), _SEPARATED)

FAMILIES = (
    _family("xml_pairs", _openers(_NAMED, "after"), _openers(_NAMED, "after"), {}, "after", _PAIRS),
    _family(
        "xml_pairs_hunyuan",
        _openers(_CALLS, "calls"),
        _openers(_SEPARATED, "calls"),
        {"separator": "<tool_sep>", "calls": "<tool_calls>", "calls_end": "</tool_calls>"},
        "calls",
        _PAIRS._replace(after_name="<tool_sep>\n", open="<tool_calls>\n", close="\n</tool_calls>"),
    ),
)
