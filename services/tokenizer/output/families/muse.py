"""The messages of Muse, each with a recipient: ``<|start|>assistant to=R<|message|>…<|eom|>``.

What is said to ``self`` is reasoning, to ``user`` content, and to a tool calls in XML:
``<atem:function_calls>`` with ``<atem:invoke name="F">`` and ``<atem:parameter name="K">``. The
prompt brings the first ``<|start|>assistant``.
"""

from __future__ import annotations

from penstock.services.tokenizer.output.families.xml_invoke import invocations
from penstock.services.tokenizer.output.family import (
    Action,
    Channel,
    ChannelThinking,
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
    "start": "<|start|>",
    "message": "<|message|>",
    "eom": "<|eom|>",
    "eot": "<|eot|>",
    "open": "<atem:function_calls>",
    "close": "</atem:function_calls>",
}
_XML = invocations("muse", _MARKS, invoke="atem:invoke", parameter="atem:parameter")


def _headers(start: Pattern) -> tuple[Edge, ...]:
    """The edges from the begin of a message to its text."""
    recipients = (
        ("to=self", "thinking"),
        ("to=user", "text"),
        (sequence("to=", name("<>")), "calls"),
    )
    return (
        *(
            Edge(sequence(start, SPACE, recipient, SPACE, Mark("message")), to)
            for recipient, to in recipients
        ),
        Edge(sequence(start, SPACE, Mark("message")), "text"),
    )


_STARTED = sequence(Mark("start"), SPACE, optional("assistant"))
_ENDS = (*_headers(_STARTED), *(Edge(Mark(mark), "after") for mark in ("eom", "eot")))
_CALL_ENDS = tuple(edge._replace(actions=(Action.END,)) for edge in _ENDS)
_ENVELOPE = _XML.envelope or Envelope("", "", "")
_PARAMETERS, _VALUE = _XML.states["parameters"], _XML.states["value"]

FAMILIES = (
    Family(
        name="muse",
        marks=_MARKS,
        openers=_ENDS,
        begin=behind_space((*_ENDS, *_headers(optional("assistant")))),
        states={
            **_XML.states,
            "parameters": Expect(
                (*_PARAMETERS.edges, *behind_space(_CALL_ENDS)), "after", (Action.END,)
            ),
            "value": Free(Channel.VALUE, (*_VALUE.edges, *_CALL_ENDS)),
            "thinking": Free(Channel.REASONING, _ENDS),
            "text": Free(Channel.TEXT, _ENDS),
            "calls": Expect(behind_space((*_XML.openers, *_ENDS)), "text"),
        },
        reasoning=None,
        no_tools=frozenset({"self", "user"}),
        channels=True,
        channel_thinking=ChannelThinking(
            " to=self<|message|>",
            "<|eom|>",
            "<|start|>",
            header=r"\s*(assistant)?\s*to=self",
            in_header=True,
            following="<|start|>assistant",
            reply=(" to=user<|message|>", "<|eom|>"),
        ),
        envelope=_ENVELOPE._replace(
            open="",
            before_name=f" to={{name}}<|message|>{_ENVELOPE.open}{_ENVELOPE.before_name}{{name}}",
            end=f"{_ENVELOPE.end}{_ENVELOPE.close}<|eom|>",
            close="",
            separator="<|start|>assistant",
        ),
    ),
)
