"""What clients may ask for as the form of an answer, and what comes of it."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from penstock.loadtest.models.make_model import SPECIAL_TOKENS, make_tokenizer
from penstock.protocol.grammar.compiler import compile_grammar
from penstock.protocol.grammar.compiler import make_tokenizer as make_vocabulary
from penstock.protocol.grammar.request import (
    MAX_CHOICES,
    MAX_DEPTH,
    MAX_SOURCE_BYTES,
    BadGrammar,
    Grammar,
    conflict,
    depth,
    from_response_format,
    from_structured_outputs,
    read_schema,
)
from penstock.protocol.validation import InvalidValue
from penstock.services.tokenizer.grammar_process import walk

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

VOCAB_SIZE = 600
"""88 more than the tokenizer has, as padded embeddings do."""
END = 2
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["admin", "guest", 7, None]},
        "scores": {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 3},
        "more": {
            "type": "object",
            "properties": {
                "ok": {"type": "boolean"},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["ok", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "kind", "scores", "more"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return make_vocabulary(make_tokenizer(512).to_str(), VOCAB_SIZE, [END])


def allowed(matcher: LLMatcher) -> list[int]:
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    return [token for token in range(mask.bit_length()) if mask >> token & 1]


def follow(grammar: Grammar, vocabulary: LLTokenizer, seed: int) -> str:
    """A random answer, of at most 600 tokens; what can end is ended with even chances."""
    matcher = compile_grammar(grammar, vocabulary)
    chance = random.Random(seed)
    tokens: list[int] = []
    while len(tokens) < 600:
        candidates = allowed(matcher)
        assert candidates and candidates[-1] < VOCAB_SIZE
        if END in candidates and (len(candidates) == 1 or chance.random() < 0.5):
            return vocabulary.decode_str(tokens)
        candidates = [token for token in candidates if token != END]
        closing = [token for token in candidates if vocabulary.decode_str([token])[0] in '"]}']
        tokens.append(chance.choice(closing if closing and chance.random() < 0.3 else candidates))
        assert matcher.consume_token(tokens[-1]), matcher.get_error()
    raise AssertionError(f"no end: {vocabulary.decode_str(tokens)[:200]}")


def accepts(grammar: Grammar, text: str, vocabulary: LLTokenizer) -> bool:
    """Whether the text as a whole is an answer."""
    matcher = compile_grammar(grammar, vocabulary)
    tokens = vocabulary.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


# --- the fields of a request


def test_a_response_format_of_text_asks_for_nothing() -> None:
    assert from_response_format({"type": "text"}) is None


def test_a_response_format_becomes_a_grammar_that_names_it() -> None:
    assert from_response_format({"type": "json_object"}) == Grammar(
        "json_object", param="response_format"
    )
    format = {"name": "person", "description": "x", "schema": SCHEMA, "strict": True}
    made = from_response_format({"type": "json_schema", "json_schema": format})
    assert made is not None
    assert (made.kind, made.param) == ("json_schema", "response_format")
    assert json.loads(made.source) == SCHEMA
    assert list(json.loads(made.source)["properties"]) == list(SCHEMA["properties"])


def test_nulls_in_a_response_format_count_as_left_out() -> None:
    format = {"name": "a", "schema": {"type": "string"}, "strict": None, "description": None}
    made = from_response_format({"type": "json_schema", "json_schema": format})
    assert made is not None and made.source == '{"type":"string"}'


@pytest.mark.parametrize(
    ("asked", "made"),
    [
        ({"json": {"type": "string"}}, Grammar("json_schema", '{"type":"string"}')),
        ({"json": ' {"type": "string"}'}, Grammar("json_schema", '{"type":"string"}')),
        ({"json": True}, Grammar("json_schema", "{}")),
        ({"json_object": True}, Grammar("json_object")),
        ({"json_object": True, "regex": None}, Grammar("json_object")),
        (
            {"json_object": True, "disable_any_whitespace": True},
            Grammar("json_object", compact=True),
        ),
        ({"regex": "a+", "disable_fallback": True}, Grammar("regex", "a+")),
        ({"choice": ["b", "a", "b"]}, Grammar("choice", '["b","a"]')),
        ({"grammar": 'start: "a"'}, Grammar("grammar", 'start: "a"')),
    ],
)
def test_structured_outputs_become_a_grammar(asked: dict[str, Any], made: Grammar) -> None:
    assert from_structured_outputs(asked) == made


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("json_object", "'json_object'; an object"),
        ({}, "type is missing; 'text', 'json_object' or 'json_schema'"),
        ({"type": "xml"}, "'xml'"),
        ({"type": "text", "grammar": "x"}, "unknown .* grammar; known are type"),
        ({"type": "json_object", "schema": {}}, "did you mean json_schema"),
        ({"type": "json_schema"}, "json_schema is missing; an object"),
        ({"type": "text", "json_schema": {"name": "a", "schema": {}}}, "only with the type"),
        ({"type": "json_schema", "json_schema": {"name": "a"}}, "schema is missing"),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, "name is missing"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "name": ""}}, "name is empty"),
        ({"type": "json_schema", "json_schema": {"schema": "{}", "name": "a"}}, "an object"),
        (
            {"type": "json_schema", "json_schema": {"schema": {}, "name": "a", "strict": 1}},
            "strict is 1; true or false",
        ),
        ({"type": "json_schema", "json_schema": {"schema": {}, "name": "a" * 65}}, "at most 64"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "name": 5}}, "name is 5; a string"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "sort": 5}}, "sort; known are name"),
    ],
)
def test_a_wrong_response_format_is_refused_with_its_cause(asked: Any, says: str) -> None:
    with pytest.raises(InvalidValue, match=says) as caught:
        from_response_format(asked)
    assert caught.value.param == "response_format"


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("a", "'a'; an object"),
        ({}, "none of json, .*; exactly one"),
        ({"json": None}, "none of json, "),
        ({"json": {}, "regex": "a"}, "json and regex; one alone"),
        ({"regexp": "a"}, "did you mean regex"),
        ({"regex": "a", "whitespace_pattern": " *"}, "whitespace_pattern; known are"),
        ({"regex": "a", "disable_additional_properties": True}, "disable_additional_properties"),
        ({"regex": "a", "disable_any_whitespace": 1}, "whitespace is 1; true or false"),
        ({"regex": ""}, "not empty"),
        ({"regex": 5}, "is 5; a string"),
        ({"grammar": "  "}, "not empty"),
        ({"grammar": '{"grammars": [{"lark_grammar": "start: "}]}'}, "is JSON; a grammar in Lark"),
        ({"json_object": False}, "is false; only true"),
        ({"json": 5}, "is 5; an object"),
        ({"json": []}, "an array of 0; an object"),
        ({"json": "{"}, "not valid JSON"),
        ({"json": '{"a":' * 5000 + "1" + "}" * 5000}, f"5000 levels deep; at most {MAX_DEPTH}"),
        ({"json": '"' + "a" * MAX_SOURCE_BYTES + '"'}, f"at most {MAX_SOURCE_BYTES}"),
        ({"json": {"const": "é" * (MAX_SOURCE_BYTES // 2)}}, f"at most {MAX_SOURCE_BYTES}"),
        ({"regex": "a" * (MAX_SOURCE_BYTES + 1)}, f"at most {MAX_SOURCE_BYTES}"),
        ({"regex": "\ud800"}, "surrogate"),
        ({"choice": []}, f"is empty; an array of 1 to {MAX_CHOICES} strings"),
        ({"choice": "a"}, "array"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, f"at most {MAX_CHOICES}"),
        ({"choice": ["a", 5]}, r"choice\[1\] is 5; a string"),
        ({"choice": [""]}, "is empty"),
        ({"choice": ["a" * 5000]}, "5000 characters"),
    ],
)
def test_wrong_structured_outputs_are_refused_with_their_cause(asked: Any, says: str) -> None:
    with pytest.raises(InvalidValue, match=says) as caught:
        from_structured_outputs(asked)
    assert caught.value.param == "structured_outputs"
    assert len(caught.value.message) < 1000


def test_brackets_within_strings_are_no_levels() -> None:
    assert depth(json.dumps({"[[[": ['"[[', '\\"{', "\\\\"]})) == 2
    assert depth("5") == 0
    assert read_schema("[" * MAX_DEPTH + "]" * MAX_DEPTH, "x") is not None


def test_what_may_leave_no_token_is_refused_together_with_a_grammar() -> None:
    grammar = Grammar("json_object", param="response_format")
    assert conflict(grammar, allowed_token_ids=False, bad_words=False) is None
    for names in ({"allowed_token_ids": True}, {"bad_words": True}):
        reason = conflict(grammar, **{"allowed_token_ids": False, "bad_words": False} | names)
        assert reason is not None
        assert "response_format" in reason and next(iter(names)) in reason


def test_a_grammar_on_the_wire_is_bounded() -> None:
    for wrong in (
        ["regex", "a" * (MAX_SOURCE_BYTES + 1)],
        ["regexp", "a"],
        ["regex", "a", False, "model"],
        ["regex", "a", False, "response_format", b"\0" * 65],
    ):
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(wrong), type=Grammar)


def test_the_tokens_that_a_grammar_starts_after_are_read_from_int32() -> None:
    ids = b"".join(one.to_bytes(4, "little") for one in (5, 151_668))
    assert Grammar("json_object", start_after=ids).starts_after() == [5, 151_668]
    assert Grammar("json_object").starts_after() == []


# --- compiled


def check_person(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["name", "age", "kind", "scores", "more"]
    assert isinstance(value["name"], str) and len(value["name"]) <= 8
    assert isinstance(value["age"], int) and 0 <= value["age"] <= 150
    assert value["kind"] in ("admin", "guest", 7, None)
    assert 1 <= len(value["scores"]) <= 3
    assert all(isinstance(score, int | float) for score in value["scores"])
    assert value["more"].keys() == {"ok", "zip"}
    assert isinstance(value["more"]["ok"], bool)
    assert len(value["more"]["zip"]) == 5 and value["more"]["zip"].isdigit()


def check_compact(text: str) -> None:
    check_person(text)
    again = json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False)
    assert sum(map(text.count, " \n\t")) == sum(map(again.count, " \n\t"))


def check_object(text: str) -> None:
    assert isinstance(json.loads(text), dict)


def check_choice(text: str) -> None:
    assert text in ('a"b', "a\\b\n", "ab", "abé")


def check_regex(text: str) -> None:
    head, _, tail = text.partition("-")
    assert len(head) == 3 and head.isdigit() and tail in ("x", "xy")


def check_sum(text: str) -> None:
    assert text.replace(" ", "").replace("+", "").isdigit()


CASES: list[tuple[dict[str, Any], Callable[[str], None]]] = [
    ({"json": SCHEMA}, check_person),
    ({"json": SCHEMA, "disable_any_whitespace": True}, check_compact),
    ({"json": {"type": "object", "additionalProperties": {"type": "integer"}}}, check_object),
    ({"choice": ['a"b', "a\\b\n", "ab", "abé"]}, check_choice),
    ({"regex": "[0-9]{3}-xy?"}, check_regex),
    ({"grammar": 'start: NUMBER (" + " NUMBER)*\nNUMBER: /[0-9]{1,3}/'}, check_sum),
    ({"grammar": 'root ::= number (" + " number)*\nnumber ::= [0-9]+'}, check_sum),
]


@pytest.mark.parametrize(("asked", "check"), CASES)
def test_random_answers_under_the_masks_are_what_was_asked_for(
    asked: dict[str, Any], check: Callable[[str], None], vocabulary: LLTokenizer
) -> None:
    grammar = from_structured_outputs(asked)
    for seed in range(12):
        check(follow(grammar, vocabulary, seed))


def test_json_may_be_indented_but_not_padded_for_ever(vocabulary: LLTokenizer) -> None:
    grammar = Grammar("json_schema", '{"type": "object", "additionalProperties": true}')
    value = {"a": [1, {"b": None}], "c": "x"}
    for text in (
        json.dumps(value),
        json.dumps(value, separators=(",", ":")),
        json.dumps(value, indent=2),
        json.dumps(value, indent="\t"),
    ):
        assert accepts(grammar, text, vocabulary)
    assert not accepts(grammar, '{"a":' + " " * 40 + "1}", vocabulary)
    assert not accepts(grammar, '{"a":\n\n1}', vocabulary)
    assert not accepts(grammar, "\n{}", vocabulary)


def test_a_schema_cannot_change_how_it_is_compiled(vocabulary: LLTokenizer) -> None:
    lenient = {"x-guidance": {"lenient": True, "whitespace_pattern": " *"}, "type": "string"}
    with pytest.raises(BadGrammar, match=r"response_format: .*format"):
        compile_grammar(
            Grammar("json_schema", json.dumps(lenient | {"format": "?"}), param="response_format"),
            vocabulary,
        )
    padded = Grammar("json_schema", json.dumps(lenient | {"type": "array"}))
    assert not accepts(padded, "[" + " " * 40 + "]", vocabulary)


def test_tokens_that_are_no_text_never_come(vocabulary: LLTokenizer) -> None:
    candidates = allowed(compile_grammar(Grammar("regex", "(?s:.)*"), vocabulary))
    assert END in candidates
    assert not {0, 1} & set(candidates)
    assert candidates[-1] < 512


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (Grammar("json_schema", '{"type": "strng"}'), "#/type must be one of"),
        (Grammar("json_schema", "{"), "not valid JSON"),
        (Grammar("json_schema", "5"), "object"),
        (Grammar("json_schema", '{"a":' * 5000 + "1" + "}" * 5000), "5000 levels"),
        (Grammar("json_schema", '{"$ref": "#"}'), "nothing matches"),
        (Grammar("json_schema", '{"$ref": "https://example.org/a"}'), "schema: "),
        (Grammar("regex", "("), "regex: .*unclosed group"),
        (Grammar("choice", "[5]"), "choices"),
        (Grammar("grammar", "start: start"), "nothing matches"),
        (Grammar("grammar", "start: other"), "other"),
        (Grammar("grammar", '{"grammars": []}'), "not JSON"),
        (Grammar("grammar", "root ::= other"), "other"),
        (Grammar("grammar", "root ::= " + "(" * 3000 + '"a"' + ")" * 3000), "too deeply"),
        (Grammar("grammar", "root ::= " + '"a" ' * 20_000), "at most 32768 bytes"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_its_cause(
    grammar: Grammar, says: str, vocabulary: LLTokenizer
) -> None:
    with pytest.raises(BadGrammar, match=says) as caught:
        compile_grammar(grammar, vocabulary)
    assert caught.value.param == "structured_outputs"
    assert len(caught.value.message) < 500


# --- vocabularies


def test_a_model_without_end_tokens_can_have_no_grammar() -> None:
    with pytest.raises(ValueError, match="no end token"):
        make_vocabulary(make_tokenizer(512).to_str(), 512, [])


def test_a_tokenizer_that_cannot_be_read_is_an_error_and_no_panic() -> None:
    for text in ("{}", "[]", "{", '{"model": {"type": "BPE", "vocab": {}, "merges": []}}'):
        with pytest.raises(ValueError, match=r"token|object|JSON|malformed|truncated"):
            make_vocabulary(text, 512, [2])


def test_tokens_past_the_models_vocabulary_are_left_out() -> None:
    tokenizer = make_tokenizer(512)
    tokenizer.add_special_tokens(["<|padding|>"])
    tokenizer.enable_padding(pad_token="<|padding|>", pad_id=512)
    made = make_vocabulary(tokenizer.to_str(), 512, [END])
    assert made.vocab_size == 512
    assert allowed(compile_grammar(Grammar("regex", "a"), made))


def test_every_end_token_may_end_an_answer() -> None:
    made = make_vocabulary(make_tokenizer(512).to_str(), 512, [END, 0])
    matcher = compile_grammar(Grammar("regex", "a?"), made)
    assert {0, END} <= set(allowed(matcher))
    assert SPECIAL_TOKENS[END] == "<|im_end|>"


SPELLED = {
    "choice": (json.dumps(["<|im_end|>"]), "<|im_end|>"),
    "regex": (r"a<\|im_end\|>b", "a<|im_end|>b"),
    "grammar": ('start: "a<|im_end|>b"', "a<|im_end|>b"),
    "json_schema": (json.dumps({"const": "<|im_end|>"}), '"<|im_end|>"'),
}


@pytest.mark.parametrize("kind", SPELLED)
def test_the_text_of_a_special_token_is_written_with_other_tokens(
    kind: Any, vocabulary: LLTokenizer
) -> None:
    source, expected = SPELLED[kind]
    for seed in range(4):
        assert follow(Grammar(kind, source), vocabulary, seed) == expected
    walk(Grammar(kind, source), vocabulary)


def test_a_hidden_spelling_of_a_special_token_is_refused_with_the_tokens_name(
    vocabulary: LLTokenizer,
) -> None:
    with pytest.raises(BadGrammar, match=r"it spells '<\|im_end\|>', a special token.*as it is"):
        walk(Grammar("regex", r"a[<]\|im_end\|>b"), vocabulary)


def test_a_hundred_thousand_placeholders_keep_the_library_busy_for_a_few_seconds_at_most() -> None:
    tokenizer = json.loads(make_tokenizer(512).to_str())
    first = 512
    tokenizer["added_tokens"] += [
        {
            "id": first + number,
            "content": f"<extra_{number}>",
            "special": False,
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
        }
        for number in range(100_000)
    ]
    began = time.process_time()
    made = make_vocabulary(json.dumps(tokenizer), first + 100_000, [END])
    assert made.vocab_size == first + 100_000
    assert allowed(compile_grammar(Grammar("regex", "a"), made))[-1] < first
    assert allowed(compile_grammar(Grammar("regex", "<" * 60_000), made))[-1] < first
    assert time.process_time() - began < 10
