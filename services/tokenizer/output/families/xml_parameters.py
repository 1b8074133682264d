"""XML parameters: ``<tool_call><function=NAME><parameter=K>V</parameter></function></tool_call>``.

Qwen3-Coder, Qwen3.5, MiMo, Step-3.5, Nemotron 3. These models are known to forget the outer tag, to
forget the tag that ends a parameter, and to write a second function where the first has not ended.
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
from penstock.services.tokenizer.output.pattern import SPACE, Mark, name, sequence

_CLOSE = Mark("close")
_FUNCTION = sequence("<function=", name("<>"), ">")
_PARAMETER = sequence("<parameter=", name("<>", "key"), ">")
_OPENERS = (
    Edge(sequence(Mark("open"), SPACE, _FUNCTION), "parameters", (Action.CALL,)),
    Edge(_FUNCTION, "parameters", (Action.CALL,)),
)
_KEYS = (Edge(_PARAMETER, "value", (Action.KEY,)),)
_ENDS = (
    Edge(sequence("</function>"), "function_end", (Action.END,)),
    Edge(_CLOSE, "after", (Action.END,)),
)

FAMILIES = (
    Family(
        name="xml_parameters",
        marks={"open": "<tool_call>", "close": "</tool_call>"},
        openers=_OPENERS,
        states={
            "parameters": Expect(
                behind_space((*_KEYS, *_ENDS, *_OPENERS)), otherwise="after", actions=(Action.END,)
            ),
            "value": Free(
                Channel.VALUE,
                (
                    Edge(sequence("</parameter>"), "parameters", (Action.VALUE_END,)),
                    *_KEYS,
                    *_ENDS,
                ),
            ),
            "function_end": Expect(behind_space((Edge(_CLOSE, "after"), *_OPENERS)), "after"),
        },
        envelope=Envelope(
            before_name="<tool_call>\n<function=",
            after_name=">\n",
            end="</function>\n</tool_call>",
            form=ArgumentForm.PARAMETERS,
            before_value="<parameter={key}>\n",
            after_value="\n</parameter>\n",
            value_excludes="</parameter>",
        ),
        newlines=True,
    ),
)
