from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.counted import instructions
from support.growth import LINEAR, sixteenfold
from support.tokenizer.tokenizer_zoo import zoo

from penstock.services.tokenizer.detokenizer import (
    ByteDetokenizer,
    PieceDetokenizer,
    WindowDetokenizer,
    new_detokenizer,
)
from penstock.services.tokenizer.token_table import ByteTable, build_token_table

KINDS = sorted(zoo())
TABLES = {kind: build_token_table(tokenizer) for kind, tokenizer in zoo().items()}
EMOJI = "👩‍👩‍👧‍👦 🇩🇪 x😀é水🏳️‍🌈"


def pieces_of(kind: str, ids: list[int]) -> list[str]:
    detokenizer = new_detokenizer(TABLES[kind])
    return [*map(detokenizer.push, ids), detokenizer.flush()]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=50, deadline=None, derandomize=True)
def test_random_ids_give_the_text_of_one_whole_decode(kind: str, data: st.DataObject) -> None:
    tokenizer = zoo()[kind]
    size = tokenizer.get_vocab_size()
    few = st.lists(st.integers(0, size + 5), max_size=40)
    # Bytes of invalid and of broken UTF-8 sit at the low ids of the byte vocabularies.
    low = st.lists(st.integers(0, min(size, 258)), max_size=40)
    ids = data.draw(few | low)
    assert "".join(pieces_of(kind, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["byte_level", "llama_2", "llama_2 without strip"])
@given(text=st.text(max_size=60))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_encoded_text_comes_back_whole(kind: str, text: str) -> None:
    tokenizer = zoo()[kind]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert "".join(pieces_of(kind, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


def test_no_piece_holds_a_broken_character_of_a_valid_text() -> None:
    for kind in ("byte_level", "llama_2"):
        ids = zoo()[kind].encode(EMOJI, add_special_tokens=False).ids
        pieces = pieces_of(kind, ids)
        assert len(ids) > len(EMOJI)
        assert "".join(pieces) == EMOJI
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_is_released_with_its_last_byte() -> None:
    tokenizer = zoo()["byte_level"]
    ids = [tokenizer.token_to_id(token) for token in ("ð", "Ł", "ĺ", "Ģ")]
    assert pieces_of("byte_level", ids) == ["", "", "", "😀", ""]


def test_flush_turns_an_unfinished_character_into_one_replacement_character() -> None:
    tokenizer = zoo()["byte_level"]
    ids = [tokenizer.token_to_id(token) for token in ("a", "ð", "Ł")]
    assert pieces_of("byte_level", ids) == ["a", "", "", "\ufffd"]


def test_special_tokens_and_unknown_ids_give_no_text() -> None:
    tokenizer = zoo()["byte_level"]
    end = tokenizer.token_to_id("<|im_end|>")
    assert pieces_of("byte_level", [end, 10**6, -1, end]) == [""] * 5


def test_added_tokens_that_are_not_special_are_text() -> None:
    tokenizer = zoo()["byte_level"]
    assert pieces_of("byte_level", [tokenizer.token_to_id("<think>")])[0] == "<think>"


def test_each_decoder_has_the_quickest_exact_detokenizer() -> None:
    made = {kind: type(new_detokenizer(table)) for kind, table in TABLES.items()}
    assert made == {
        "byte_level": ByteDetokenizer,
        "llama_2": PieceDetokenizer,
        "llama_2 without strip": PieceDetokenizer,
        "metaspace first": PieceDetokenizer,
        "metaspace never": PieceDetokenizer,
        "unigram": PieceDetokenizer,
        "unigram with bytes": PieceDetokenizer,
        "word_piece": WindowDetokenizer,
        "no_decoder": WindowDetokenizer,
    }


def seconds(kind: str, ids: list[int]) -> float:
    push = new_detokenizer(TABLES[kind]).push
    begin = time.process_time()
    for token in ids:
        push(token)
    return time.process_time() - begin


@pytest.mark.parametrize(
    ("kind", "count"), [("byte_level", 20_000), ("llama_2", 20_000), ("word_piece", 1_000)]
)
def test_time_is_linear_in_the_number_of_tokens(kind: str, count: int) -> None:
    size = zoo()[kind].get_vocab_size()
    draw = random.Random(7)
    ids = [draw.randrange(size) for _ in range(4 * count)]
    assert sixteenfold(lambda number: seconds(kind, ids[:number]), count) < LINEAR


def test_an_endless_row_of_unfinished_characters_stays_linear() -> None:
    byte = zoo()["llama_2"].token_to_id("<0xF0>")
    lead = zoo()["byte_level"].token_to_id("ð")
    assert sixteenfold(lambda number: seconds("llama_2", [byte] * number), 20_000) < LINEAR
    assert sixteenfold(lambda number: seconds("byte_level", [lead] * number), 20_000) < LINEAR


def test_a_common_token_takes_forty_instructions() -> None:
    """Which are 0.2 µs."""
    table = TABLES["byte_level"]
    assert isinstance(table, ByteTable)
    ids = [n for n, piece in enumerate(table.pieces) if isinstance(piece, str) and piece]
    assert 5 < instructions(lambda: seconds("byte_level", ids)) / len(ids) < 80
