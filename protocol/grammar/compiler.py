"""Compiles a ``Grammar`` with llguidance, and makes the vocabulary that it is compiled for.

llguidance is imported where it is used: frontend, router and scheduler do not have it. The helper
that vets grammars for a tokenizer and the worker that follows them use the same functions with the
same limits, so that what the one has accepted does not fail in the other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.protocol.conversion import tokenizer_command
from penstock.protocol.grammar.json_schema.check import OPTIONS, exact
from penstock.protocol.grammar.request import BadGrammar, Grammar, ToolGrammar, read_schema
from penstock.protocol.model_info import BadModelFolder, read_text

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_GBNF_BYTES = 32 * 1024
"""The converter of GBNF is Python, and holds the interpreter: 1 ms for 2 KiB."""
MAX_ADDED_TOKENS = 4096
"""llguidance reads added tokens one by one, at a cost that grows with their square."""
MAX_TOKENIZER_BYTES = 512 * 1024 * 1024
MAX_REASON = 300

WHITESPACE = r" {1,2}|\n[ \t]{0,20}"
"""Allowed between the parts of JSON: a model can indent, and cannot emit blanks for ever."""
_JSON_OPTIONS: dict[str, Any] = {**OPTIONS, "whitespace_pattern": WHITESPACE}
"""Every option by name: none is left to ``x-guidance`` in a client's schema."""
_SPELLED = '%llguidance {"no_forcing": true}\n'
"""The model chooses the tokens of a text where no other may come. By itself the library gives those
that the tokenizer makes of it; where a special token has the same text, that token is among them,
and no text is made of it."""
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_TAKEN_FOR = re.compile(r"\[([0-9]{1,9})\]\" doesn't satisfy the grammar; forced bytes")
_COMPACT_OPTIONS = {**_JSON_OPTIONS, "whitespace_flexible": False, "whitespace_pattern": None}


def parser_limits() -> LLParserLimits:
    """What compiling a grammar and each mask may take.

    The times are those of ordinary grammars. An ambiguous one can take 0.3 s for a mask within the
    same limits, so whoever follows grammars must look at the clock too.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=2000,
        initial_lexer_fuel=1_000_000,  # 20 ms; the largest schemas known take half
        step_lexer_fuel=200_000,  # 14 ms
        step_max_items=20_000,  # 2 to 10 ms: 300 alternatives of an anyOf take 12,000
        max_lexer_states=20_000,  # 40 MB for one matcher; the default allows 500
        max_grammar_size=250_000,  # the largest schemas known: 200,000
        precompute_large_lexemes=True,
        verbose_errors=False,  # the parser's state is no client's business
    )


def load_tokenizer(folder: Path, vocab_size: int, ends: Sequence[int]) -> LLTokenizer:
    """``make_tokenizer`` for the ``tokenizer.json`` of a checkpoint. Raises ``BadModelFolder``."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise BadModelFolder(
            f"{path}: no such file, and grammars are made for no other; write it: "
            f"{tokenizer_command(folder)}"
        )
    try:
        text = read_text(path, MAX_TOKENIZER_BYTES).decode()
        return make_tokenizer(text, vocab_size, ends)
    except (ValueError, ImportError) as error:
        if isinstance(error, BadModelFolder):
            raise
        raise BadModelFolder(f"{path}: no grammars with this model: {error}") from None


def make_tokenizer(tokenizer_json: str, vocab_size: int, ends: Sequence[int]) -> LLTokenizer:
    """The vocabulary of a model, from the text of its ``tokenizer.json``.

    Takes 0.8 to 1.5 s for 150,000 tokens, and holds the interpreter.

    Args:
        vocab_size: of the model; ids for which the tokenizer has no token are never allowed.
        ends: the model's end tokens.

    Raises ``ValueError`` for a tokenizer that llguidance cannot read, or a model without ends.
    """
    from llguidance import LLTokenizer

    if not ends:
        raise ValueError("the model has no end token, so no grammar could end an answer")
    text = _fitted(tokenizer_json, vocab_size)
    try:
        made = LLTokenizer(
            text, n_vocab=vocab_size, eos_token=list(ends), slices=LLTokenizer.json_slices()
        )
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library's panics do not derive from Exception
        raise ValueError(f"llguidance cannot read the tokenizer: {error}") from None
    if made.vocab_size != vocab_size:
        raise ValueError(f"llguidance sees {made.vocab_size} tokens, the model has {vocab_size}")
    _special_texts(made)
    return made


class _SpecialTexts:
    """The texts of a vocabulary's special tokens. Takes 10 ms for 150,000 tokens."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        special = filter(tokenizer.is_special_token, range(tokenizer.vocab_size))
        self._texts = {text for token in special if (text := tokenizer.decode_str([token]))}
        lengths: dict[str, set[int]] = {}
        for text in self._texts:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = lengths
        self._firsts = re.compile(f"[{''.join(map(re.escape, lengths))}]") if lengths else None

    def stand_in(self, source: str) -> bool:
        """Whether one stands in a source, perhaps with backslashes in it. At each of their first
        characters it costs a look-up for each of their lengths, however many texts there are."""
        if self._firsts is None:
            return False
        plain = source.replace("\\", "")
        return any(
            plain[place.start() : place.start() + length] in self._texts
            for place in self._firsts.finditer(plain)
            for length in self._lengths[place[0]]
        )


_special_texts = lru_cache(maxsize=4)(_SpecialTexts)


def _fitted(tokenizer_json: str, vocab_size: int) -> str:
    """The text as llguidance can read it.

    Without padding and truncation, without tokens past the model's vocabulary, without placeholders
    at its end, of which models with random weights have a hundred thousand; and with a decoder that
    llguidance knows (``_with_known_decoder``).
    """
    tokenizer = msgspec.json.decode(tokenizer_json)
    if not isinstance(tokenizer, dict):
        raise ValueError("tokenizer.json: expected an object")
    added = tokenizer.get("added_tokens") or []
    kept = [one for one in added if one["id"] < vocab_size]
    if len(kept) > MAX_ADDED_TOKENS:
        kept = sorted(kept, key=lambda one: int(one["id"]))[:MAX_ADDED_TOKENS]
    fitted = {"added_tokens": kept, "truncation": None, "padding": None}
    if _with_known_decoder(tokenizer, kept) or any(
        tokenizer.get(key) != value for key, value in fitted.items()
    ):
        return msgspec.json.encode(tokenizer | fitted).decode()
    return tokenizer_json


_PIECES = ("Metaspace", "Replace", "ByteFallback", "Fuse", "Strip")


def _with_known_decoder(tokenizer: dict[str, Any], added: list[dict[str, Any]]) -> bool:
    """Change ``tokenizer``, and tokens of ``added``, where llguidance would misread them. Returns
    whether it did. Raises ``ValueError`` where a token's text depends on its neighbours.

    Only bytes, and pieces with a mark for blanks and tokens for bytes, are read. A Metaspace
    decoder has the mark but no bytes: its ``<0x41>`` is no ``A``, and is allowed nowhere.
    """
    decoder = tokenizer.get("decoder") or {}
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return False
    if not kinds or not set(kinds) <= set(_PIECES):
        named = ", ".join(str(kind) for kind in kinds if kind) or "none"
        raise ValueError(
            "grammars need a vocabulary of bytes or of SentencePiece's pieces, and the decoder "
            f"of this model's tokenizer is another: {named}"
        )
    changed = False
    if kinds == ["Metaspace"]:
        _replace_metaspace(tokenizer, steps[0], added)
        changed = True
    if tokenizer.get("normalizer"):
        # The text of such a token is what the normalizer makes of it: blanks become part of it.
        for one in added:
            if one.get("normalized") and not one.get("special"):
                one["special"] = changed = True
    return changed


def _replace_metaspace(
    tokenizer: dict[str, Any], decoder: dict[str, Any], added: list[dict[str, Any]]
) -> None:
    """Give the tokenizer a decoder that reads its pieces alike, and allow those nowhere that it
    reads otherwise: tokens for bytes; and where the first token of a text loses its marks, those
    with a mark behind a letter. (Rows of marks stay: they indent. An answer that must begin with a
    blank may lose it there.)"""
    mark = decoder["replacement"]
    blanks = {"type": "Replace", "pattern": {"String": mark}, "content": " "}
    steps = [blanks, {"type": "ByteFallback"}, {"type": "Fuse"}]
    tokenizer["decoder"] = {"type": "Sequence", "decoders": steps}
    drops = decoder.get("prepend_scheme", "always") != "never"
    known = {one["id"] for one in added}
    vocabulary = tokenizer["model"]["vocab"]
    if isinstance(vocabulary, list):  # of pieces and their scores
        vocabulary = {piece: number for number, (piece, _) in enumerate(vocabulary)}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for token, number in vocabulary.items():
        if number in known:
            continue
        if _BYTE_TOKEN.fullmatch(token) or (drops and mark in token.lstrip(mark)):
            added.append({"id": number, "content": token, "special": True} | flags)


def compile_grammar(grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
    """A matcher at its beginning, with its first mask computed.

    Raises ``BadGrammar`` with llguidance's reason. May take long, and much memory, where nothing
    has vetted the grammar before.
    """
    text = grammar_text(grammar)
    if _special_texts(tokenizer).stand_in(grammar.source):
        text = _begun(text, f"{_SPELLED}start: @answer")
    matcher = _compiled(grammar, text, tokenizer)
    if grammar.padded:
        (blank, *_) = tokenizer.tokenize_bytes(b" ")
        may_begin_blank = matcher.deep_copy().try_consume_tokens([blank]) == 1
        matcher = _compiled(grammar, _padded(text, optional=not may_begin_blank), tokenizer)
    return matcher


def _padded(text: str, *, optional: bool) -> str:
    """The grammar with the blank before it that decoding drops. It is a must where the answer may
    begin with another one: else that would be dropped."""
    return _begun(text, f'start: " "{"?" if optional else ""} @answer')


def _begun(text: str, lark: str) -> str:
    """A grammar in Lark's syntax that names another one as ``@answer``."""
    start = {"name": "begun", "lark_grammar": lark}
    answer = _first(text) | {"name": "answer"}
    return msgspec.json.encode({"grammars": [start, answer, *_rest(text)]}).decode()


def _compiled(grammar: Grammar, text: str, tokenizer: LLTokenizer) -> LLMatcher:
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, text, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise _refused(grammar, matcher.get_error())
    return matcher


def grammar_text(grammar: Grammar) -> str:
    """The grammar as llguidance reads it. Raises ``BadGrammar``."""
    from llguidance import LLMatcher

    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.source)
    if grammar.kind == "choice":
        return LLMatcher.grammar_from_lark(_choice_rule(grammar))
    if grammar.kind == "grammar":
        return LLMatcher.grammar_from_lark(_lark(grammar))
    if grammar.kind == "tools":
        return _calls(grammar)
    schema = {"type": "object"}
    if grammar.kind == "json_schema":
        schema = read_schema(grammar.source, grammar.param)
    return _json(grammar, schema)


def _json(grammar: Grammar, schema: Any) -> str:
    from llguidance import LLMatcher

    options = _COMPACT_OPTIONS if grammar.compact else _JSON_OPTIONS
    try:
        return LLMatcher.grammar_from_json_schema(
            msgspec.json.encode(exact(schema)).decode(),
            overrides=options,  # type: ignore[arg-type]
        )
    except ValueError as error:
        raise _refused(grammar, str(error)) from None


def _calls(grammar: Grammar) -> str:
    """Calls of tools, or else what the answer's content must look like."""
    source = msgspec.json.decode(grammar.source, type=ToolGrammar)
    lark, parts = source.lark, list[dict[str, Any]]()
    for name, schema in source.schemas.items():
        parts.append(_first(_json(grammar, schema)) | {"name": name})
    if source.content is not None:
        name = "content"
        if "@content" not in lark:
            name = "instead"
            lark = lark.replace("start: ", "start: calls | @instead\ncalls: ", 1)
        text = grammar_text(source.content)
        parts += [_first(text) | {"name": name}, *_rest(text)]
    start = {"name": "calls", "lark_grammar": lark}
    return msgspec.json.encode({"grammars": [start, *parts]}).decode()


def _first(text: str) -> dict[str, Any]:
    """The grammar of a text as llguidance reads it, or the first of its grammars."""
    if not text.startswith("{"):
        return {"lark_grammar": text}
    found: dict[str, Any] = msgspec.json.decode(text)["grammars"][0]
    return found


def _rest(text: str) -> list[dict[str, Any]]:
    """The grammars that the first one of a text names."""
    return msgspec.json.decode(text)["grammars"][1:] if text.startswith("{") else []


def _choice_rule(grammar: Grammar) -> str:
    """One terminal that lists the strings, quoted as JSON: Lark's escapes are the same. (As a rule
    each would be an item of the parser, of which a row has 2,000 at most.)"""
    try:
        choices = msgspec.json.decode(grammar.source, type=list[str])
    except msgspec.DecodeError as error:
        raise _refused(grammar, f"the choices are no array of strings: {error}") from None
    return "start: CHOICE\nCHOICE: " + " | ".join(_quoted(choice) for choice in choices)


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()


def _lark(grammar: Grammar) -> str:
    """The grammar in Lark's syntax; one with ``::=`` and without Lark's start rule is GBNF."""
    from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

    source = grammar.source
    if source.lstrip().startswith("{"):
        raise _refused(grammar, "expected a grammar in Lark or GBNF syntax, not JSON")
    if "::=" not in source or is_lark_syntax(source):
        return source
    if (size := len(source.encode())) > MAX_GBNF_BYTES:
        raise _refused(grammar, f"a GBNF grammar has at most {MAX_GBNF_BYTES} bytes, this {size}")
    try:
        return gbnf_to_lark(source)
    except RecursionError:
        raise _refused(grammar, "the GBNF grammar is nested too deeply") from None
    except Exception as error:  # the converter raises whatever its code runs into
        raise _refused(grammar, f"the GBNF grammar cannot be read: {error}") from None


def no_extension(reason: str) -> bool:
    """Whether a matcher's error says that no token is left, and nothing else."""
    return reason.startswith("NoExtension")


def special_token(reason: str) -> int | None:
    """The special token that the library took a text for; ``None``: another error."""
    found = _TAKEN_FOR.search(reason)
    return int(found[1]) if found else None


def one_line(reason: str) -> str:
    """llguidance's reason in one line of bounded length."""
    lines = (line.strip() for line in reason.replace("<non-verbose/>", "").splitlines())
    text = " ".join(line for line in lines if line)
    return text if len(text) <= MAX_REASON else text[:MAX_REASON] + "…"


def _refused(grammar: Grammar, reason: str) -> BadGrammar:
    shown = one_line(reason)
    if no_extension(reason):
        shown = "nothing matches it, or it needs a character that the vocabulary lacks"
    return BadGrammar(f"{grammar.param}: the {_NAMES[grammar.kind]}: {shown}", grammar.param)


_NAMES = {
    "json_schema": "schema",
    "json_object": "JSON object",
    "regex": "regex",
    "choice": "choices",
    "grammar": "grammar",
    "tools": "calls of them",
}
