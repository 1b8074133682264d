"""Structured outputs over each kind of vocabulary: what decodes to a fitting text is allowed."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from support.tokenizer.tokenizer_zoo import llama_2, metaspace, unigram, word_piece, zoo
from tokenizers import AddedToken, Tokenizer

from penstock.protocol.grammar.compiler import compile_grammar, make_tokenizer
from penstock.protocol.grammar.request import Grammar
from penstock.services.tokenizer.detokenizer import new_detokenizer
from penstock.services.tokenizer.token_table import PieceTable, build_token_table, drops_first_blank

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["the pipe", "naïve café", "日本"]},
        "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
ANSWER = {"name": "水 x", "kind": "the pipe", "sizes": [7, 12]}
JSON_LETTERS = [*'{}[]":, abcdefghijklmnopqrstuvwxyz0123456789\n', "é", "ï", "水", "▁{", "▁the"]


def with_json(tokenizer: Tokenizer) -> Tokenizer:
    """The same with the characters of JSON as plain tokens of its vocabulary."""
    tree = json.loads(tokenizer.to_str())
    vocabulary = tree["model"]["vocab"]
    if isinstance(vocabulary, list):
        known = {piece for piece, _ in vocabulary}
        vocabulary += [[each, -7.0] for each in JSON_LETTERS if each not in known and each != " "]
    else:
        tree["added_tokens"] = [each for each in tree["added_tokens"] if each["special"]]
        missing = [each for each in JSON_LETTERS if each not in vocabulary and each != " "]
        vocabulary.update({each: len(vocabulary) + n for n, each in enumerate(missing)})
    return Tokenizer.from_str(json.dumps(tree))


KINDS = {
    "byte_level": lambda: zoo()["byte_level"],
    "llama_2": lambda: with_json(llama_2()),
    "llama_2 without strip": lambda: with_json(llama_2(strip=False)),
    "metaspace first": lambda: with_json(metaspace("first")),
    "metaspace never": lambda: with_json(metaspace("never")),
    "unigram": lambda: with_json(unigram()),
    "unigram with bytes": lambda: with_json(unigram(byte_fallback=True)),
}


class Model:
    """A vocabulary with what decodes it, and the grammars over it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.end = tokenizer.token_to_id("</s>") or tokenizer.token_to_id("<|im_end|>")
        self.size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.vocabulary = make_tokenizer(tokenizer.to_str(), self.size, [self.end])
        self.table = build_token_table(tokenizer)
        self.closing = {n for n in range(self.size) if set(self.text([n])) & set('"}],')}
        """Tokens that may end something."""

    def matcher(self, kind: Any, source: Any) -> Any:
        text = source if isinstance(source, str) else json.dumps(source)
        padded = drops_first_blank(self.table)
        return compile_grammar(Grammar(kind, text, padded=padded), self.vocabulary)

    def allowed(self, matcher: Any) -> list[int]:
        mask = matcher.compute_bitmask()
        return [n for n in range(self.size) if mask[n // 8] >> n % 8 & 1]

    def text(self, ids: list[int]) -> str:
        detokenizer = new_detokenizer(self.table)
        return "".join(map(detokenizer.push, ids)) + detokenizer.flush()


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest) -> Model:
    return Model(KINDS[request.param]())


def drawn(model: Model, matcher: Any, draw: random.Random, most: int = 400) -> list[int] | None:
    """Tokens drawn from what is allowed until the end; the plain ends of things are preferred, so
    that there is one."""
    ids: list[int] = []
    while len(ids) < most:
        allowed = model.allowed(matcher)
        if model.end in allowed:
            return ids
        closing = [n for n in allowed if n in model.closing]
        ids.append(draw.choice(closing if closing and draw.random() < 0.4 else allowed))
        assert matcher.consume_token(ids[-1])
    return None


def test_whatever_a_schema_allows_decodes_to_a_fitting_text(model: Model) -> None:
    draw = random.Random(3)
    done = 0
    for _ in range(20):
        ids = drawn(model, model.matcher("json_schema", SCHEMA), draw)
        if ids is not None:
            jsonschema.validate(json.loads(model.text(ids)), SCHEMA)
            done += 1
    assert done > 5


@pytest.mark.parametrize("indent", [None, 1])
def test_the_tokens_of_a_fitting_text_are_all_allowed(model: Model, indent: int | None) -> None:
    text = json.dumps(ANSWER, ensure_ascii=False, indent=indent)
    ids = model.tokenizer.encode(text, add_special_tokens=False).ids
    if model.text(ids) != text:
        pytest.skip("the tokenizer does not give this text back")
    matcher = model.matcher("json_schema", SCHEMA)
    for at, token in enumerate(ids):
        assert token in model.allowed(matcher), (at, model.tokenizer.id_to_token(token))
        assert matcher.consume_token(token)
    assert model.end in model.allowed(matcher)


@pytest.mark.parametrize(
    ("kind", "source", "texts"),
    [
        ("choice", ["the", " he", "x y"], {"the", " he", "x y"}),
        ("choice", ["the", "he"], {"the", "he"}),
        ("regex", " ?he", {"he", " he"}),
        ("regex", "the|he x", {"the", "he x"}),
        ("grammar", 'start: "the" | " he"', {"the", " he"}),
    ],
)
def test_every_way_through_a_small_grammar_decodes_to_one_of_its_texts(
    model: Model, kind: str, source: Any, texts: set[str]
) -> None:
    found: set[str] = set()

    def walk(matcher: Any, ids: list[int]) -> None:
        for token in model.allowed(matcher):
            if token == model.end:
                found.add(model.text(ids))
                continue
            following = matcher.deep_copy()
            assert following.consume_token(token)
            walk(following, [*ids, token])

    walk(model.matcher(kind, source), [])
    if isinstance(model.table, PieceTable) and model.table.first_drops:
        # Its first token loses all of its blanks, and one of blanks alone is nothing then.
        found, texts = ({text.lstrip() for text in each} for each in (found, texts))
    assert found <= texts
    padded = drops_first_blank(model.table)
    blank = any(text.startswith(" ") for text in texts)
    assert found == texts or (padded and blank and found)


def test_an_answer_may_begin_with_the_blank_that_decoding_drops() -> None:
    model = Model(KINDS["llama_2"]())
    allowed = model.allowed(model.matcher("json_schema", SCHEMA))
    assert model.tokenizer.token_to_id("▁{") in allowed
    assert model.tokenizer.token_to_id("{") in allowed


def test_an_added_token_whose_text_is_normalized_is_allowed_nowhere() -> None:
    tokenizer = llama_2()
    tokenizer.add_tokens([AddedToken("hello", normalized=True)])
    model = Model(tokenizer)
    number = tokenizer.token_to_id("hello")
    assert model.text([280, number]) != "thehello"
    assert number not in model.allowed(model.matcher("regex", "[a-z]+"))


@pytest.mark.parametrize(
    ("kind", "named"), [("word_piece", "WordPiece"), ("no_decoder", "another: none")]
)
def test_a_vocabulary_whose_texts_depend_on_their_neighbours_is_refused(
    kind: str, named: str
) -> None:
    tokenizer = zoo()[kind]
    with pytest.raises(ValueError, match=named):
        make_tokenizer(tokenizer.to_str(), tokenizer.get_vocab_size(), [1])
    assert word_piece().decoder is not None
