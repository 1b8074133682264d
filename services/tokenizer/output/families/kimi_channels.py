"""The channels of Kimi K3: ``<|open|>NAME<|sep|>…<|close|>NAME<|sep|>``.

``think`` is reasoning and ``response`` content. All calls stand in ``tools``, each as
``<|open|>call tool="F" index="1"<|sep|>`` with ``<|open|>argument key="K" type="T"<|sep|>V`` for
each of its arguments, or with one object in ``json``. Only values of the type ``string`` are no
JSON. The prompt has opened a channel.
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
    behind_space,
)
from penstock.services.tokenizer.output.json_scanner import JsonScanner
from penstock.services.tokenizer.output.pattern import (
    SPACE,
    Characters,
    Mark,
    Pattern,
    name,
    optional,
    sequence,
)

_SEP = Mark("sep")


def _opens(what: Pattern | str) -> Pattern:
    return sequence(Mark("open"), what, _SEP)


def _closes(what: str) -> Pattern:
    return sequence(Mark("close"), what, _SEP)


_INDEX = optional(' index="', Characters("0-9", 1, 6), '"')
_CALL = _opens(sequence('call tool="', name('"<>'), '"', _INDEX))
_CALLS = (
    Edge(sequence(_opens("tools"), SPACE, _CALL), "arguments", (Action.CALL,)),
    Edge(_CALL, "arguments", (Action.CALL,)),
)
_CHANNELS = (
    Edge(_opens("think"), "thinking"),
    Edge(_opens("response"), "text"),
    *(Edge(_closes(what), "after") for what in ("think", "response", "tools", "message")),
)
_EDGES = (*_CHANNELS, *_CALLS)
_ENDS = (
    Edge(_closes("call"), "after", (Action.END,)),
    *(edge._replace(actions=(Action.END,)) for edge in _CHANNELS),
    *_CALLS,
)
_KEY = sequence('argument key="', name('"<>', "key"), '"')
_ARGUMENTS = (
    Edge(_opens(sequence(_KEY, ' type="string"')), "value", (Action.KEY_STRING,)),
    Edge(
        _opens(sequence(_KEY, ' type="', Characters("a-z", 1, 16), '"')),
        "value",
        (Action.KEY_JSON,),
    ),
    Edge(_opens(_KEY), "value", (Action.KEY,)),
)
_JSON = Edge(_opens(sequence("json", optional(' type="object"'))), "json")

FAMILIES = (
    Family(
        name="kimi_channels",
        marks={"open": "<|open|>", "close": "<|close|>", "sep": "<|sep|>"},
        openers=_EDGES,
        begin=behind_space(_EDGES),
        states={
            "thinking": Free(Channel.REASONING, _EDGES),
            "text": Free(Channel.TEXT, _EDGES),
            "arguments": Expect(behind_space((*_ARGUMENTS, _JSON, *_ENDS)), "after", (Action.END,)),
            "value": Free(
                Channel.VALUE,
                (Edge(_closes("argument"), "arguments", (Action.VALUE_END,)), *_ENDS),
            ),
            "json": Scan(JsonScanner, "json_end", _ENDS),
            "json_end": Expect(
                behind_space((Edge(_closes("json"), "json_end"), *_ENDS)), "after", (Action.END,)
            ),
        },
        reasoning=None,
        channels=True,
        channel_thinking=ChannelThinking(
            "<|open|>think<|sep|>",
            "<|close|>think<|sep|>",
            "<|open|>",
            header="think",
            reply=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
            always_replies=True,
            ending="<|close|>message<|sep|>",
        ),
        envelope=Envelope(
            open="<|open|>tools<|sep|>",
            before_name='<|open|>call tool="',
            after_name='" index="{index}"<|sep|><|open|>json type="object"<|sep|>',
            end="<|close|>json<|sep|><|close|>call<|sep|>",
            separator="",
            close="<|close|>tools<|sep|>",
        ),
    ),
)
