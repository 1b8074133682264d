"""The messages of Inkling: ``<|message_model|>…<|end_message|>``, each with a mark of its kind.

``<|content_thinking|>`` begins reasoning and ``<|content_text|>`` content. A call is
``NAME<|content_invoke_tool_json|>{"name": "NAME", "args": {…}}``: the object says which tool is
called. The prompt may have brought the first ``<|message_model|>``.
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
    behind_space,
)
from penstock.services.tokenizer.output.json_calls import ARGUMENTS, call_headers, object_states
from penstock.services.tokenizer.output.pattern import SPACE, Characters, Mark

_HEADER = Characters(r"^\s<>\x00-\x1f\ud800-\udfff", 0, 128)
_MESSAGES = (
    Edge(Mark("thinking"), "thinking"),
    Edge(Mark("text"), "text"),
    *call_headers(_HEADER, Mark("invoke"), SPACE, keys=('"args"', *ARGUMENTS)),
)
_ENDS = (
    Edge(Mark("model"), "message"),
    *(Edge(Mark(mark), "after") for mark in ("end", "stop")),
)
_CALL_ENDS = tuple(edge._replace(actions=(Action.END,)) for edge in _ENDS)

FAMILIES = (
    Family(
        name="inkling",
        marks={
            "model": "<|message_model|>",
            "thinking": "<|content_thinking|>",
            "text": "<|content_text|>",
            "invoke": "<|content_invoke_tool_json|>",
            "end": "<|end_message|>",
            "stop": "<|content_model_end_sampling|>",
        },
        openers=_ENDS,
        begin=behind_space((*_ENDS, *_MESSAGES)),
        states={
            "message": Expect(behind_space((*_MESSAGES, *_ENDS)), "content"),
            "thinking": Free(Channel.REASONING, _ENDS),
            "text": Free(Channel.TEXT, _ENDS),
            **object_states("object_end", _CALL_ENDS),
            "object_end": Expect(behind_space(_ENDS), "after"),
        },
        reasoning=None,
        channels=True,
        channel_thinking=ChannelThinking(
            "<|content_thinking|>",
            "<|end_message|>",
            "<|content_thinking|>",
            following="<|message_model|>",
            reply=("<|content_text|>", "<|end_message|>"),
        ),
        envelope=Envelope(
            before_name='{name}<|content_invoke_tool_json|>{"name": "{name}',
            after_name='", "args": ',
            end="}<|end_message|>",
            separator="<|message_model|>",
        ),
    ),
)
