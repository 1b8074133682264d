"""XML invoke: ``<invoke name="F"><parameter name="K">V</parameter></invoke>`` in a wrapper.

MiniMax M2 and later; DeepSeek V3.2 and later, whose tags begin with ``｜DSML｜`` and say whether a
value is a string; Step 3, whose calls stand between tokens; MiniCPM 5, without a wrapper and with
CDATA.
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
    either,
    name,
    optional,
    sequence,
)

_QUOTE = optional(either('"', "'"))


def invocations(
    family: str,
    marks: dict[str, str],
    *,
    invoke: str = "invoke",
    parameter: str = "parameter",
    before: tuple[Pattern | str, ...] = (),
    says_type: bool = False,
    envelope: tuple[str, str] = ("", ""),
) -> Family:
    """marks: ``open`` and ``close`` of the wrapper, and ``call_end`` of what holds a single call.
    invoke, parameter: the names of the tags. before: what stands before each of the former.
    envelope: what stands between the wrapper's begin and a call, and behind a call."""
    call = sequence(*before, f"<{invoke} name=", _QUOTE, name("<>\"'"), _QUOTE, ">")
    key = sequence(f"<{parameter} name=", _QUOTE, name("<>\"'", "key"), _QUOTE)
    opener = sequence(Mark("open"), SPACE, call) if "open" in marks else call
    closing = (Edge(Mark("close"), "after"),) if "close" in marks else ()
    inner = (Edge(Mark("call_end"), "invoke_end"),) if "call_end" in marks else ()
    keys = (
        Edge(sequence(key, SPACE, 'string="true">'), "value", (Action.KEY_STRING,)),
        Edge(sequence(key, SPACE, 'string="false">'), "value", (Action.KEY_JSON,)),
        Edge(sequence(key, "><![CDATA["), "cdata", (Action.KEY_STRING,)),
        Edge(sequence(key, ">"), "value", (Action.KEY,)),
    )
    ends = tuple(
        edge._replace(actions=(Action.END,))
        for edge in (Edge(sequence(f"</{invoke}>"), "invoke_end"), *inner, *closing)
    )
    value_end = Edge(sequence(f"</{parameter}>"), "parameters", (Action.VALUE_END,))
    cdata_end = Edge(sequence("]]>", SPACE, f"</{parameter}>"), "parameters", (Action.VALUE_END,))
    following = Edge(call, "parameters", (Action.CALL,))
    return Family(
        name=family,
        marks=marks,
        openers=(Edge(opener, "parameters", (Action.CALL,)),),
        states={
            "parameters": Expect(
                behind_space((*keys, *ends, following)), otherwise="after", actions=(Action.END,)
            ),
            "value": Free(Channel.VALUE, (value_end, *ends)),
            "cdata": Free(Channel.VALUE, (cdata_end,)),
            "invoke_end": Expect(behind_space((*inner, *closing, following)), "after"),
        },
        envelope=_envelope(marks, invoke, parameter, envelope, says_type),
    )


def _envelope(
    marks: dict[str, str], invoke: str, parameter: str, around: tuple[str, str], says_type: bool
) -> Envelope:
    """How a grammar has these calls written. around: what stands around each."""
    typed = ' string="true"' if says_type else ""
    return Envelope(
        open=marks.get("open", "") + ("\n" if "open" in marks else ""),
        before_name=f'{around[0]}<{invoke} name="',
        after_name='">\n',
        end=f"</{invoke}>{around[1]}",
        close=("\n" if "close" in marks else "") + marks.get("close", ""),
        form=ArgumentForm.PARAMETERS,
        before_value=f'<{parameter} name="{{key}}"{typed}>',
        before_json=f'<{parameter} name="{{key}}" string="false">' if says_type else "",
        after_value=f"</{parameter}>\n",
        value_excludes=f"</{parameter}>",
    )


def _dsml(family: str, wrapper: str) -> Family:
    dsml = "｜DSML｜"
    return invocations(
        family,
        {"open": f"<{dsml}{wrapper}>", "close": f"</{dsml}{wrapper}>"},
        invoke=f"{dsml}invoke",
        parameter=f"{dsml}parameter",
        says_type=True,
    )


FAMILIES = (
    invocations(
        "xml_invoke_minimax",
        {"open": "<minimax:tool_call>", "close": "</minimax:tool_call>"},
    ),
    _dsml("xml_invoke_dsml", "function_calls"),
    _dsml("xml_invoke_dsml_v4", "tool_calls"),
    invocations(
        "xml_invoke_step3",
        {
            "open": "<｜tool_calls_begin｜>",
            "close": "<｜tool_calls_end｜>",
            "call": "<｜tool_call_begin｜>",
            "call_end": "<｜tool_call_end｜>",
            "separator": "<｜tool_sep｜>",
        },
        invoke="steptml:invoke",
        parameter="steptml:parameter",
        before=(Mark("call"), SPACE, "function", SPACE, Mark("separator"), SPACE),
        envelope=("<｜tool_call_begin｜>function<｜tool_sep｜>", "<｜tool_call_end｜>"),
    ),
    invocations("xml_invoke_minicpm", {}, invoke="function", parameter="param"),
)
