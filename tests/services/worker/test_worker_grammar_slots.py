"""The grammars of slots: masks, tokens, failures, and what is kept of compiled grammars."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock.kernels.sampling.allowed_tokens import allowed_mask, mask_words
from penstock.loadtest.models.make_model import make_tokenizer
from penstock.protocol.grammar.compiler import compile_grammar
from penstock.protocol.grammar.compiler import make_tokenizer as make_vocabulary
from penstock.protocol.grammar.request import BadGrammar, Grammar
from penstock.protocol.wire.messages.steps import NewSlot, SlotAdjustments
from penstock.services.worker import grammar_slots
from penstock.services.worker.grammar_prototypes import MAX_COPIES, Prototypes
from penstock.services.worker.grammar_rows import GrammarRows
from penstock.services.worker.grammar_slots import NOT_YET, Failure, GrammarSlots

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

SLOTS = 8
VOCAB_SIZE = 601
"""No multiple of 32, and 89 more than the tokenizer has."""
END, OTHER_END = 2, 0
PATIENCE = 20.0
"""Seconds for grammars to be compiled in, where a test is about something else."""
DIGITS = Grammar("regex", "[0-9]{2}")
PERSON = Grammar(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 6},
                "kind": {"enum": ["a", "b"]},
                "scores": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
            },
            "required": ["name", "kind", "scores"],
            "additionalProperties": False,
        }
    ),
)


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return make_vocabulary(make_tokenizer(512).to_str(), VOCAB_SIZE, [END, OTHER_END])


@pytest.fixture
def slots(vocabulary: LLTokenizer) -> Iterator[GrammarSlots]:
    one = GrammarSlots(SLOTS, VOCAB_SIZE, lambda: vocabulary, threads=2, patience=PATIENCE)
    yield one
    one.close()


def fill(slots: GrammarSlots, *rows: int) -> tuple[list[set[int]], dict[int, Failure]]:
    """The tokens allowed in each row, and the rows that failed."""
    out = np.full((len(rows), mask_words(VOCAB_SIZE)), -1, np.int32)
    slots.start(rows, out)
    failed = slots.wait()
    bits = np.unpackbits(out.view(np.uint8), axis=1, bitorder="little")
    assert not bits[:, VOCAB_SIZE:].any(), "bits past the vocabulary"
    return [set(row.nonzero()[0].tolist()) for row in bits], failed


def allowed(slots: GrammarSlots, slot: int) -> set[int]:
    (one,), failed = fill(slots, slot)
    assert failed == {}
    return one


def ids(text: str, vocabulary: LLTokenizer) -> list[int]:
    return vocabulary.tokenize_str(text)


ALL = set(range(VOCAB_SIZE))


def test_a_mask_has_the_layout_of_the_sampler(slots: GrammarSlots) -> None:
    tokens = [0, 31, 32, 100, VOCAB_SIZE - 1]
    assert (slots.mask(tokens) == allowed_mask(tokens, VOCAB_SIZE)).all()
    assert slots.mask(tokens).dtype == np.int32


def test_a_slot_without_a_grammar_may_have_any_token(slots: GrammarSlots) -> None:
    assert not slots.has(3)
    assert allowed(slots, 3) == ALL


def test_the_mask_follows_the_tokens_to_the_end(
    slots: GrammarSlots, vocabulary: LLTokenizer
) -> None:
    slots.begin(1, DIGITS, [])
    assert slots.has(1)
    one, two = ids("1", vocabulary), ids("2", vocabulary)
    first = allowed(slots, 1)
    assert {*one, *two} <= first
    assert not {END, OTHER_END} & first
    assert all(vocabulary.decode_str([token]).isdigit() for token in first)
    slots.took([1], one)
    assert {*one, *two} <= allowed(slots, 1)
    slots.took([1], two)
    assert allowed(slots, 1) == {END, OTHER_END}
    slots.took([1], [END])
    assert allowed(slots, 1) == {END, OTHER_END}


def test_whoever_goes_on_after_the_end_gets_the_end_again(slots: GrammarSlots) -> None:
    slots.begin(0, Grammar("choice", '["a"]'), [])
    for _ in range(5):
        (token, *_) = sorted(allowed(slots, 0) - {OTHER_END}) or [END]
        slots.took([0], [token])
    assert allowed(slots, 0) == {END, OTHER_END}


def test_a_sequence_that_comes_back_goes_on_where_it_was(
    slots: GrammarSlots, vocabulary: LLTokenizer
) -> None:
    text = ids('{"name":"ab","kind":', vocabulary)
    for cut in range(len(text) + 1):
        slots.begin(2, PERSON, text[:cut])
        slots.took([2] * (len(text) - cut), text[cut:])
        tokens = allowed(slots, 2)
        assert {vocabulary.decode_str([token])[0] for token in tokens} <= {'"', " ", "\n"}


def test_slots_are_independent_and_forgotten_ones_are_free(
    slots: GrammarSlots, vocabulary: LLTokenizer
) -> None:
    for slot in range(4):
        slots.begin(slot, DIGITS, ids("1" * (slot % 3), vocabulary))
    slots.forget(3)
    (a, b, c, d), failed = fill(slots, 0, 1, 2, 3)
    assert failed == {}
    assert a > b - {END} and END not in a | b
    assert c == {END, OTHER_END}
    assert d == ALL
    (c, a), _ = fill(slots, 2, 0)
    assert c == {END, OTHER_END} and len(a) > 2


def test_many_tokens_at_once_are_fed_in_order(slots: GrammarSlots, vocabulary: LLTokenizer) -> None:
    for slot in range(SLOTS):
        slots.begin(slot, DIGITS, [])
    fill(slots, *range(SLOTS))
    slots.took(range(SLOTS), ids("7", vocabulary) * SLOTS)
    fill(slots, *range(SLOTS))
    slots.took(range(SLOTS), ids("8", vocabulary) * SLOTS)
    rows, failed = fill(slots, *range(SLOTS))
    assert failed == {}
    assert rows == [{END, OTHER_END}] * SLOTS


# --- thinking and least tokens


def test_the_answer_is_free_until_its_token_has_come(
    slots: GrammarSlots, vocabulary: LLTokenizer
) -> None:
    after = Grammar("regex", "[0-9]{2}", start_after=(300).to_bytes(4, "little"))
    slots.begin(0, after, [50, 60])
    assert allowed(slots, 0) == ALL - {END, OTHER_END}
    slots.took([0], [70])
    assert allowed(slots, 0) == ALL - {END, OTHER_END}
    slots.took([0], [300])
    assert END not in allowed(slots, 0)
    for digit in "12":
        slots.took([0], ids(digit, vocabulary))
    assert allowed(slots, 0) == {END, OTHER_END}
    slots.begin(1, after, [50, 300, *ids("1", vocabulary)])
    assert allowed(slots, 1) < ALL
    slots.begin(1, after, [300, 300])
    assert fill(slots, 1)[1].keys() == {0}


def test_an_answer_may_open_with_a_token_that_makes_it_free(
    slots: GrammarSlots, vocabulary: LLTokenizer
) -> None:
    begin, end = ((number).to_bytes(4, "little") for number in (299, 300))
    thinking = Grammar("regex", "[0-9]{2}", start_after=end, may_open=begin)
    slots.begin(0, thinking, [])
    digits = allowed(slots, 0)
    assert slots.opening(0) == 299 and 299 not in digits and END not in digits
    slots.took([0], [299])
    assert slots.opening(0) == -1
    assert allowed(slots, 0) == ALL - {END, OTHER_END}
    slots.took([0], [300])
    assert allowed(slots, 0) == digits
    slots.begin(1, thinking, [])
    slots.took([1], ids("1", vocabulary))
    assert slots.opening(1) == -1 and END not in allowed(slots, 1)
    slots.took([1], ids("2", vocabulary))
    assert allowed(slots, 1) == {END, OTHER_END}
    slots.begin(2, thinking, [299, 70, 300, *ids("1", vocabulary)])
    assert END not in allowed(slots, 2) and 70 not in allowed(slots, 2)


def test_the_masks_behind_drafts_are_those_that_would_come_there(
    slots: GrammarSlots, vocabulary: LLTokenizer
) -> None:
    """Also behind the end, and with a least number of tokens; the slot is where it was."""
    choice = Grammar("choice", '["perhaps","No"]')
    drafts = [[*ids("perhaps", vocabulary), END, END], ids("12", vocabulary), [], [5, 6]]
    slots.begin(0, choice, [], min_tokens=9, ends=[END])
    slots.begin(1, DIGITS, [])
    slots.begin(2, DIGITS, ids("1", vocabulary))
    expected, failed = [], {}
    for row, draft in enumerate(drafts):
        for count in range(1 + len(draft)):
            again = [choice, DIGITS, Grammar("regex", "[0-9]"), None][row]
            if again is None:
                expected.append(ALL)
                continue
            least = {"min_tokens": 9, "ends": [END]} if row == 0 else {}
            slots.begin(4 + row, again, draft[:count], **least)
            expected.append(allowed(slots, 4 + row))
    for _ in range(2):
        out = np.full((4 + sum(map(len, drafts)), mask_words(VOCAB_SIZE)), 9, np.int32)
        failed = slots.fill(range(4), out, drafts)
        bits = np.unpackbits(out.view(np.uint8), axis=1, bitorder="little")
        assert [set(row.nonzero()[0].tolist()) for row in bits] == expected
        assert failed == {}


def test_behind_a_draft_that_no_grammar_allows_stands_a_mask_and_the_slot_goes_on(
    slots: GrammarSlots,
) -> None:
    slots.begin(0, DIGITS, [])
    before = allowed(slots, 0)
    out = np.full((3, mask_words(VOCAB_SIZE)), 9, np.int32)
    assert slots.fill([0], out, [[VOCAB_SIZE - 1, 5]]) == {}
    assert allowed(slots, 0) == before


def test_a_slot_guides_its_drafts_from_when_its_grammar_is_at_work(
    slots: GrammarSlots, vocabulary: LLTokenizer
) -> None:
    start = (300).to_bytes(4, "little")
    slots.begin(0, Grammar("regex", "[0-9]{2}", start_after=start), [])
    assert slots.guides(1), "it has none"
    assert not slots.guides(0), "it is not compiled"
    allowed(slots, 0)
    assert not slots.guides(0), "the answer is free"
    slots.took([0], [300])
    allowed(slots, 0)
    assert slots.guides(0)


def test_ends_wait_for_the_least_tokens_while_anything_else_is_left(
    slots: GrammarSlots, vocabulary: LLTokenizer
) -> None:
    letters = Grammar("regex", "[ab]{0,3}")
    a = ids("a", vocabulary)
    slots.begin(0, letters, [], min_tokens=2, ends=[END, OTHER_END])
    assert not {END, OTHER_END} & allowed(slots, 0)
    slots.took([0], a)
    assert not {END, OTHER_END} & allowed(slots, 0)
    slots.took([0], a)
    assert {END, OTHER_END} < allowed(slots, 0)
    slots.begin(1, letters, a * 3, min_tokens=20, ends=[END])
    assert allowed(slots, 1) == {OTHER_END}
    slots.begin(1, letters, a * 3, min_tokens=20, ends=[END, OTHER_END])
    assert allowed(slots, 1) == {END, OTHER_END}
    thinking = Grammar("regex", "a", start_after=(300).to_bytes(4, "little"))
    slots.begin(2, thinking, [], min_tokens=2, ends=[END])
    assert allowed(slots, 2) == ALL - {END, OTHER_END}


# --- failures


def test_a_row_that_fails_touches_no_other(slots: GrammarSlots, vocabulary: LLTokenizer) -> None:
    for slot in range(3):
        slots.begin(slot, DIGITS, [])
    fill(slots, 0, 1, 2)
    slots.took([0, 1, 2], [*ids("1", vocabulary), *ids("x", vocabulary), *ids("2", vocabulary)])
    rows, failed = fill(slots, 0, 1, 2)
    assert failed.keys() == {1}
    assert "cannot go on" in failed[1].reason
    assert rows[1] == ALL
    assert rows[0] == rows[2] < ALL
    assert fill(slots, 1)[1].keys() == {0}
    slots.begin(1, DIGITS, [])
    assert fill(slots, 1)[1] == {}


def test_a_grammar_that_cannot_be_compiled_fails_its_row_alone(slots: GrammarSlots) -> None:
    slots.begin(0, Grammar("regex", "("), [])
    slots.begin(1, DIGITS, [])
    rows, failed = fill(slots, 0, 1)
    assert failed.keys() == {0}
    assert "unclosed group" in failed[0].reason
    assert rows[1] < ALL


def test_a_row_whose_masks_are_slow_ends_and_the_others_go_on(
    slots: GrammarSlots, vocabulary: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleepy = Grammar("regex", "[a-z]*")
    slots.begin(0, sleepy, [])
    slots.begin(1, DIGITS, [])
    fill(slots, 0, 1)
    monkeypatch.setattr(grammar_slots, "SLOW_SECONDS", -1.0)
    for _ in range(grammar_slots.MAX_SLOW):
        assert fill(slots, 0)[1] == {}
    assert fill(slots, 0)[1].keys() == {0}
    monkeypatch.setattr(grammar_slots, "SLOW_SECONDS", 10.0)
    rows, failed = fill(slots, 0, 1)
    assert "for a token" in failed[0].reason and failed.keys() == {0}
    assert rows[1] < ALL


def test_a_slow_fill_is_looked_into_and_then_rows_are_filled_together_again(
    slots: GrammarSlots, monkeypatch: pytest.MonkeyPatch
) -> None:
    for slot in range(3):
        slots.begin(slot, DIGITS, [])
    together = fill(slots, 0, 1, 2)
    monkeypatch.setattr(grammar_slots, "SLOW_SECONDS", -1.0)
    fill(slots, 0, 1, 2)
    monkeypatch.setattr(grammar_slots, "SLOW_SECONDS", 10.0)
    for _ in range(grammar_slots.WATCHED_FILLS + 2):
        assert fill(slots, 0, 1, 2) == together


def test_a_vocabulary_that_cannot_be_read_fails_every_row_with_its_cause() -> None:
    def load() -> LLTokenizer:
        raise ValueError("no such vocabulary")

    slots = GrammarSlots(2, VOCAB_SIZE, load, threads=1, patience=PATIENCE)
    slots.begin(0, DIGITS, [])
    assert "no such vocabulary" in fill(slots, 0, 1)[1][0].reason
    assert fill(slots, 0, 1)[1].keys() == {0}
    slots.begin(1, Grammar("regex", "a", start_after=(300).to_bytes(4, "little")), [])
    rows, failed = fill(slots, 0, 1)
    assert failed.keys() == {0, 1}
    assert rows == [ALL, ALL]
    slots.close()


def test_a_mask_of_another_shape_is_an_error(slots: GrammarSlots) -> None:
    words = mask_words(VOCAB_SIZE)
    for wrong in (
        np.zeros((1, words), np.int32),
        np.zeros((2, words - 1), np.int32),
        np.zeros((2, words), np.int64),
        np.zeros((words, 2), np.int32).T,
    ):
        with pytest.raises(ValueError, match="contiguous int32"):
            slots.start([0, 1], wrong)
    slots.start([0], np.zeros((1, words), np.int32))
    with pytest.raises(RuntimeError, match="wait"):
        slots.start([0], np.zeros((1, words), np.int32))
    assert slots.wait() == {}
    assert slots.wait() == {}


def test_a_row_whose_grammar_is_not_compiled_yet_has_no_token_and_holds_up_no_other(
    vocabulary: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()

    def slowly(grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
        if grammar is PERSON:
            go.wait(30)
        return compile_grammar(grammar, tokenizer)

    monkeypatch.setattr(grammar_slots, "compile_grammar", slowly)
    slots = GrammarSlots(4, VOCAB_SIZE, lambda: vocabulary, threads=4, patience=0.01)
    slots.begin(0, DIGITS, [])
    slots.begin(1, PERSON, [])
    deadline = time.monotonic() + 30
    while (found := fill(slots, 0, 1))[1].keys() != {1}:
        if 0 in found[1]:  # its own compilation may take longer than the patience
            slots.begin(0, DIGITS, [])
        assert time.monotonic() < deadline
    (digits, free), failed = found
    assert failed == {1: NOT_YET}
    assert END not in digits and free == ALL
    go.set()
    slots.took([0, 1], [*ids("1", vocabulary), 99])
    assert fill(slots, 0, 1)[1] == {1: NOT_YET}, "what it was given is not the answer's"
    slots.begin(1, PERSON, [])
    while 1 in fill(slots, 0, 1)[1]:
        slots.begin(1, PERSON, [])
        assert time.monotonic() < deadline
    assert {vocabulary.decode_str([t])[0] for t in allowed(slots, 1)} <= {"{"}
    slots.close()


def test_begin_returns_before_the_vocabulary_is_read(vocabulary: LLTokenizer) -> None:
    go = threading.Event()

    def load() -> LLTokenizer:
        go.wait(30)
        return vocabulary

    slots = GrammarSlots(2, VOCAB_SIZE, load, threads=1, patience=0.01)
    slots.begin(0, DIGITS, [])
    slots.begin(1, Grammar("regex", "a", start_after=(300).to_bytes(4, "little")), [])
    assert fill(slots, 0, 1)[1] == {0: NOT_YET, 1: NOT_YET}
    go.set()
    slots.close()


def test_a_slot_whose_grammar_cannot_begin_fails_alone(vocabulary: LLTokenizer) -> None:
    rows = GrammarRows(3, VOCAB_SIZE)
    rows.serve(lambda: vocabulary, PATIENCE)
    beyond = np.array([10**6], "<i4").tobytes()
    asked = [
        SlotAdjustments(grammar=DIGITS),
        SlotAdjustments(grammar=DIGITS, min_tokens=1, ends=beyond),
        SlotAdjustments(grammar=DIGITS, min_tokens=1, ends=b"\2\0\0\0"),
    ]
    rows.begin([new_slot(slot) for slot in range(3)], asked)
    at = np.arange(3)
    masks = rows.fill(at, rows.following(at), np.empty((3, mask_words(VOCAB_SIZE)), np.int32))
    assert [(one.row, one.status) for one in masks.failures] == [(1, 503)]
    assert "cannot be followed: IndexError" in masks.failures[0].reason


def new_slot(slot: int) -> NewSlot:
    return NewSlot(slot, np.array([5], "<i4").tobytes(), 1, 0, [0], b"")


# --- whole answers


def test_random_answers_of_a_full_batch_are_what_was_asked_for(
    slots: GrammarSlots, vocabulary: LLTokenizer
) -> None:
    chance = random.Random(0)
    outputs: dict[int, list[int]] = {slot: [] for slot in range(SLOTS)}
    for slot in outputs:
        slots.begin(slot, PERSON, [])
    done: list[dict[str, Any]] = []
    while outputs:
        rows = list(outputs)
        masks, failed = fill(slots, *rows)
        assert failed == {}
        tokens = []
        for mask in masks:
            closing = [t for t in mask if vocabulary.decode_str([t]).startswith(('"', "]", "}"))]
            picked = closing if closing and chance.random() < 0.3 else sorted(mask)
            tokens.append(chance.choice(picked))
        slots.took(rows, tokens)
        for slot, token in zip(rows, tokens, strict=True):
            if token in (END, OTHER_END):
                done.append(json.loads(vocabulary.decode_str(outputs.pop(slot))))
                slots.forget(slot)
            else:
                outputs[slot].append(token)
                assert len(outputs[slot]) < 500
    assert len(done) == SLOTS
    for person in done:
        assert list(person) == ["name", "kind", "scores"]
        assert len(person["name"]) <= 6 and person["kind"] in ("a", "b")
        assert all(isinstance(score, int) for score in person["scores"])


# --- what is kept


def test_a_grammar_is_compiled_once_for_all_that_want_it(vocabulary: LLTokenizer) -> None:
    compiled: list[str] = []

    def slowly(grammar: Grammar) -> LLMatcher:
        compiled.append(grammar.source)
        time.sleep(0.05)
        return compile_grammar(grammar, vocabulary)

    prototypes = Prototypes(slowly)
    copies: list[LLMatcher] = []
    threads = [
        threading.Thread(target=lambda: copies.append(prototypes.copy(DIGITS))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert compiled == [DIGITS.source]
    assert len({id(one) for one in copies}) == 8
    assert copies[0].consume_token(ids("1", vocabulary)[0])
    assert copies[1].compute_bitmask() != copies[0].compute_bitmask()


def test_compiled_grammars_stay_within_their_number_and_their_size() -> None:
    class Matcher:
        def deep_copy(self) -> Matcher:
            return Matcher()

    prototypes = Prototypes(lambda grammar: Matcher(), entries=10, size=200)  # type: ignore[arg-type, return-value]
    for number in range(20_000):
        prototypes.copy(Grammar("regex", f"{number}" * (1 + number % 40)))
        assert len(prototypes) <= 10
        assert prototypes.size <= 200


def test_what_could_not_be_compiled_is_not_kept(vocabulary: LLTokenizer) -> None:
    prototypes = Prototypes(lambda grammar: compile_grammar(grammar, vocabulary))
    for _ in range(2):
        with pytest.raises(BadGrammar):
            prototypes.copy(Grammar("regex", "("))
    assert len(prototypes) == 0
    assert prototypes.size == 0


def test_a_family_uses_what_another_has_compiled_until_it_has_its_own(
    vocabulary: LLTokenizer,
) -> None:
    compiled: list[int] = []

    def counting(grammar: Grammar) -> LLMatcher:
        compiled.append(1)
        return compile_grammar(grammar, vocabulary)

    prototypes = Prototypes(counting)
    prototypes.copy(DIGITS, 0)
    prototypes.copy(DIGITS, 1)
    assert len(compiled) == 1 and not prototypes.has(DIGITS, 1)
    for _ in range(2):
        prototypes.make(DIGITS, 1)
        prototypes.copy(DIGITS, 1)
        assert len(compiled) == 2 and prototypes.has(DIGITS, 1)


def test_a_prototype_is_compiled_anew_after_many_copies(vocabulary: LLTokenizer) -> None:
    compiled: list[str] = []

    def counting(grammar: Grammar) -> LLMatcher:
        compiled.append(grammar.source)
        return compile_grammar(grammar, vocabulary)

    prototypes = Prototypes(counting)
    for _ in range(2 * MAX_COPIES + 1):
        prototypes.copy(DIGITS)
    assert len(compiled) == 3
    assert len(prototypes) == 1
    assert prototypes.size == len(DIGITS.source)


def test_a_panic_of_the_library_ends_the_rows_that_it_was_for(
    slots: GrammarSlots, vocabulary: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panic(BaseException):
        pass

    def panics(*_: object) -> None:
        raise Panic("out of range")

    slots.begin(0, DIGITS, [])
    fill(slots, 0)
    monkeypatch.setattr(slots, "_compute", panics)
    slots.begin(2, Grammar("regex", "a", start_after=(300).to_bytes(4, "little")), [])
    _, failed = fill(slots, 0, 1, 2)
    assert failed.keys() == {0}
    assert failed[0].status == 503
    assert "out of range" in failed[0].reason
