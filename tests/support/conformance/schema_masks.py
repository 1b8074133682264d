"""Masks of a JSON schema, followed by hand, token by token: what passes, and random answers."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from penstock.protocol.grammar.compiler import WHITESPACE, parser_limits
from penstock.protocol.grammar.json_schema.check import OPTIONS, exact, refuse

DEMO_TOKENIZER = Path(__file__).parents[3] / "demo" / "model" / "tokenizer.json"
CLOSING = (b'"', b"}", b"]", b"@", b",", b":", b"0", b" ")
"""What ends a value soonest, most useful first."""


@cache
def tokenizer(kind: str) -> LLTokenizer:
    """``bytes`` (one token a byte), or ``demo`` (the BPE tokenizer of the built-in model)."""
    if kind == "bytes":
        return LLTokenizer("byte")
    return LLTokenizer(DEMO_TOKENIZER.read_text(), eos_token=_demo_end())


@cache
def _demo_end() -> int:
    config = json.loads((DEMO_TOKENIZER.parent / "config.json").read_text())
    end = config["eos_token_id"]
    return int(end[0] if isinstance(end, list) else end)


def compiled(schema: object, kind: str = "bytes", **options: Any) -> LLMatcher | str:
    """A matcher at its beginning, or why the schema is refused: by us, or by the compiler."""
    if reason := refuse(schema):
        return reason
    assert isinstance(schema, dict)
    return compiled_raw(exact(schema), kind, **options)


def compiled_raw(schema: object, kind: str = "bytes", **options: Any) -> LLMatcher | str:
    """The same without our own checks."""
    overrides = {**OPTIONS, "whitespace_pattern": WHITESPACE, **options}
    try:
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=overrides)
    except ValueError as error:
        return f"compiler: {error}"
    matcher = LLMatcher(tokenizer(kind), grammar, log_level=0, limits=parser_limits())
    return f"compiler: {matcher.get_error()}" if matcher.is_error() else matcher


def takes(matcher: LLMatcher, text: str) -> bool:
    """Is ``text`` a complete answer under the mask? The matcher must be one over bytes."""
    data = list(text.encode())
    follower = matcher.deep_copy()
    return follower.try_consume_tokens(data) == len(data) and follower.is_accepting()


def allowed(matcher: LLMatcher) -> list[int]:
    """Ids that may come next."""
    mask = matcher.compute_bitmask()
    return [
        8 * place + bit
        for place, byte in enumerate(mask)
        if byte
        for bit in range(8)
        if byte >> bit & 1
    ]


def walk(
    matcher: LLMatcher, kind: str, dice: random.Random, patience: int = 120, most: int = 600
) -> str | None:
    """A random answer under the mask; ``None`` if it has not ended after ``most`` tokens.

    After ``patience`` tokens it takes what ends values soonest. Raises ``AssertionError`` where
    nothing may come next although the answer is not complete.
    """
    words = tokenizer(kind)
    follower, taken = matcher.deep_copy(), []
    for step in range(most):
        ids = allowed(follower)
        assert ids, f"nothing may come after {words.decode_bytes(taken)!r}"
        ends = words.eos_token in ids
        if ends and (len(ids) == 1 or step > patience or dice.random() < 0.3):
            return words.decode_bytes(taken).decode()
        ids = [one for one in ids if one != words.eos_token]
        token = _soonest(words, ids, dice) if step > patience else _any(words, ids, dice)
        assert follower.consume_token(token), words.decode_bytes([*taken, token])
        taken.append(token)
    return None


def _any(words: LLTokenizer, ids: list[int], dice: random.Random) -> int:
    """Any token; often one that ends a string, so that strings stay short."""
    if dice.random() < 0.25:
        closing = [one for one in ids if words.decode_bytes([one]).startswith((b'"', b"}", b"]"))]
        if closing:
            return dice.choice(closing)
    return dice.choice(ids)


def _soonest(words: LLTokenizer, ids: list[int], dice: random.Random) -> int:
    spelled = {words.decode_bytes([one]): one for one in ids}
    for text in CLOSING:
        if text in spelled and dice.random() < 0.8:
            return spelled[text]
    return dice.choice(ids)
