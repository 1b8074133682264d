"""Harmony, the channels of gpt-oss.

``<|start|>ROLE[ to=R]<|channel|>C[ to=R][ <|constrain|>json]<|message|>…<|end|>``, where a call
ends with ``<|call|>`` and an answer with ``<|return|>``. The prompt brings the first ``<|start|>``
and role. Analysis is reasoning, the channels ``final`` and ``commentary`` are content, and a
message to ``functions.NAME`` in any channel is a call. So is one to a declared tool without that
prefix.

Models get headers wrong: parts are missing, come twice or in another order. A header is read part
by part; what is no part of one begins the message.
"""

from __future__ import annotations

from penstock.services.tokenizer.output.family import (
    Action,
    Channel,
    ChannelThinking,
    Edge,
    Envelope,
    Expect,
    Family,
    Free,
    Scan,
    State,
    behind_space,
)
from penstock.services.tokenizer.output.json_scanner import JsonScanner
from penstock.services.tokenizer.output.pattern import Mark, Pattern, either, name, sequence

_MESSAGE, _CHANNEL, _CONSTRAIN = Mark("message"), Mark("channel"), Mark("constrain")
_NAME = name("<>{}\"'=")
_PART_END = either(_CHANNEL, _CONSTRAIN, " ")
"""What ends a recipient's name within a header."""
_TYPES = either("json", "code", "commentary", "analysis", "final")
_CHANNELS = (
    Edge(sequence("analysis"), "thinking_header"),
    Edge(sequence("commentary"), "text_header"),
    Edge(sequence("final"), "text_header"),
)
_STARTS = (Edge(Mark("start"), "role"), Edge(_CHANNEL, "channel"))
_ENDS = (
    *(Edge(Mark(mark), "after") for mark in ("end", "call", "return")),
    *_STARTS,
)
_CALL_ENDS = tuple(edge._replace(actions=(Action.END,)) for edge in _ENDS)


def _recipients(message: str) -> tuple[Edge, ...]:
    """The edges of ``to=R`` in a header. message: the state of a message to what is no tool."""
    edges: list[Edge] = []
    for prefix, actions in (
        ("to=functions.", (Action.CALL,)),
        ("to=", (Action.CALL, Action.DECLARED)),
        ("to=", ()),
    ):
        calls = bool(actions)
        whole, part = sequence(prefix, _NAME, _MESSAGE), sequence(prefix, _NAME, _PART_END)
        edges.append(Edge(whole, "arguments" if calls else message, actions))
        if calls:
            ended = sequence(prefix, _NAME, either(Mark("call"), Mark("end")))
            edges.append(Edge(ended, "after", (*actions, Action.END)))
        edges.append(Edge(part, "call_header" if calls else f"{message}_header", actions))
    return tuple(edges)


def _header(message: str) -> Expect:
    """The parts between a channel's name and its message."""
    own = f"{message}_header"
    return Expect(
        behind_space(
            (
                Edge(_MESSAGE, message),
                *_recipients(message),
                Edge(_CONSTRAIN, own),
                Edge(_TYPES, own),
                *_STARTS,
            )
        ),
        message,
    )


def _role(*ends: tuple[Pattern, str]) -> tuple[Edge, ...]:
    return tuple(Edge(sequence(_NAME, end), then) for end, then in ends)


_STATES: dict[str, State] = {
    "role": Expect(
        behind_space(
            (
                *_STARTS,
                Edge(_MESSAGE, "text"),
                *_recipients("text"),
                *_role((_CHANNEL, "channel"), (_MESSAGE, "text"), (sequence(" "), "recipient")),
            )
        )
    ),
    "recipient": Expect(
        behind_space((*_recipients("text"), *_STARTS, Edge(_MESSAGE, "text")))
    ),
    "channel": Expect(
        behind_space((*_CHANNELS, *_recipients("text"), Edge(_MESSAGE, "text")))
    ),
    "thinking_header": _header("thinking"),
    "text_header": _header("text"),
    "call_header": Expect(
        behind_space(
            (
                Edge(_MESSAGE, "arguments"),
                Edge(either(_CHANNEL, _CONSTRAIN), "call_header"),
                Edge(_TYPES, "call_header"),
            )
        ),
        "arguments",
    ),
    "thinking": Free(Channel.REASONING, _ENDS),
    "text": Free(Channel.TEXT, _ENDS),
    "arguments": Scan(JsonScanner, "arguments_end", _CALL_ENDS),
    "arguments_end": Expect(behind_space(_CALL_ENDS), "content", (Action.END,)),
}  # fmt: skip

FAMILIES = (
    Family(
        name="harmony",
        marks={
            "start": "<|start|>",
            "channel": "<|channel|>",
            "constrain": "<|constrain|>",
            "message": "<|message|>",
            "end": "<|end|>",
            "call": "<|call|>",
            "return": "<|return|>",
        },
        openers=_ENDS,
        begin=behind_space((*_STARTS, *_recipients("text"), Edge(_MESSAGE, "text"))),
        states=_STATES,
        reasoning=None,
        envelope=Envelope(
            "<|channel|>commentary to=functions.",
            " <|constrain|>json<|message|>",
            "<|call|>",
            separator="<|start|>assistant",
        ),
        channels=True,
        channel_thinking=ChannelThinking("<|channel|>analysis<|message|>", "<|end|>"),
    ),
)
