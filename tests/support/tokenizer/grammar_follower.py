"""Follows the grammar of an answer through its text, with a family's marks as tokens or as text."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from penstock.protocol.grammar.compiler import compile_grammar, make_tokenizer
from penstock.protocol.grammar.request import Grammar
from penstock.protocol.wire.messages.requests import OutputFormat, ToolMode
from penstock.services.tokenizer.output.families import FAMILIES
from penstock.services.tokenizer.output.family import Family
from penstock.services.tokenizer.output.machine import Vocabulary
from penstock.services.tokenizer.tool_grammar import Strictness, tool_grammar

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "unit": {"enum": ["C", "F"]},
                },
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}},
]
ENCODED = msgspec.json.encode(TOOLS)
END = "<|end of text|>"
"""No family's mark: where the model's answer ends, a matcher ends too."""
_JOINED = [("<", "/"), (">", "Ċ"), ("Ċ", "<"), ("Ċ", "</"), ('"', ">"), ("}", "}"), ("a", "r")]
"""Tokens that reach from a value into what ends it, as vocabularies have them."""


@cache
def tokenizer_of(name: str, as_tokens: bool) -> tuple[Tokenizer, Any, Vocabulary]:
    """Bytes, some pairs of them, and the family's marks as tokens of their own."""
    family = FAMILIES[name]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, _JOINED)]
    made = Tokenizer(models.BPE({one: number for number, one in enumerate(tokens)}, _JOINED))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    marks = [text for text in family.marks.values() if text.strip()] if as_tokens else []
    if as_tokens and family.reasoning is not None:
        marks += [family.reasoning.open, family.reasoning.close]
    made.add_tokens([AddedToken(text, special=True) for text in (*marks, END)])
    added = {one.content: number for number, one in made.get_added_tokens_decoder().items()}
    size = made.get_vocab_size(with_added_tokens=True)
    ready = make_tokenizer(made.to_str(), size, [added[END]])
    return made, ready, Vocabulary(added)


class Follower:
    """Follows a grammar through texts."""

    def __init__(
        self,
        family: Family,
        as_tokens: bool,
        mode: ToolMode = "required",
        strictness: Strictness = "function",
        tools: bytes = ENCODED,
        content: Grammar | None = None,
        **output: Any,
    ) -> None:
        self._plain, self._ready, self.vocabulary = tokenizer_of(family.name, as_tokens)
        format = OutputFormat(tools, mode, **output)
        self.grammar = tool_grammar(family, self.vocabulary, format, strictness, content)
        self._matcher: Any = None

    def takes(self, text: str) -> bool:
        """Whether the whole text may be an answer."""
        assert self.grammar is not None
        if self._matcher is None:
            self._matcher = compile_grammar(self.grammar, self._ready)
        return follows(self.grammar, self._matcher.deep_copy(), self._plain, text)


def takes(grammar: Grammar, plain: Tokenizer, ready: Any, text: str) -> bool:
    """Whether the whole text may be an answer of this grammar."""
    return follows(grammar, compile_grammar(grammar, ready), plain, text)


def follows(grammar: Grammar, matcher: Any, plain: Tokenizer, text: str) -> bool:
    """The same with a new matcher of the grammar."""
    ids = plain.encode(text, add_special_tokens=False).ids
    starts = grammar.starts_after()
    if starts:
        assert ids[0] in starts
        ids = ids[1:]
    for token in ids:
        if not _allows(matcher, token):
            return False
        matcher.consume_token(token)
    return bool(matcher.is_accepting())


def _allows(matcher: Any, token: int) -> bool:
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return bool(mask[token // 8] >> token % 8 & 1)
