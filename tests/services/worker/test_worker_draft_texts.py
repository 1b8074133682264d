"""Drafts from texts: what is found, for whom, and what it costs whatever the text."""

from __future__ import annotations

import random
from array import array
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from support.counted import instructions

from penstock.protocol.wire.messages.steps import NewSlot, StepPlan
from penstock.services.worker.speculation.drafting import MOST_DRAWN, Drafting
from penstock.services.worker.speculation.finished_outputs import FinishedOutputs
from penstock.services.worker.speculation.scanned_text import MOST_SCANNED, ScannedText
from penstock.services.worker.speculation.step_costs import DraftBudget
from penstock.services.worker.speculation.text_index import (
    DEPTH,
    END,
    MOST_MATCH,
    Match,
    TextIndex,
    Tokens,
)
from penstock.services.worker.speculation.text_proposers import (
    MOST_INDEXED,
    NgramProposer,
    SuffixProposer,
)


def fibonacci_word(length: int) -> list[int]:
    """Repeats itself at every scale."""
    shorter, longer = [1], [1, 2]
    while len(longer) < length:
        shorter, longer = longer, longer + shorter
    return longer[:length]


def texts(length: int, vocab: int = 50_000) -> dict[str, list[int]]:
    draw = random.Random(1)
    return {
        "one token": [7] * length,
        "random": [draw.randrange(vocab) for _ in range(length)],
        "two tokens": [draw.randrange(2) for _ in range(length)],
        "fibonacci": fibonacci_word(length),
    }


def begun(proposer: NgramProposer, text: list[int], slot: int = 0, corpus: bytes = b"a") -> None:
    proposer.begin(slot, np.array(text, np.int32), len(text), corpus)


def test_a_text_that_repeats_itself_goes_on_as_it_did() -> None:
    proposer = NgramProposer()
    begun(proposer, [1, 2, 3, 4, 5, 6, 9, 1, 2])
    assert proposer.propose(0, 3) is None
    proposer.took(0, [3])
    draft = proposer.propose(0, 3)
    assert draft is not None and draft.tokens == [4, 5, 6] and draft.match == 3


def test_a_period_is_continued_beyond_the_end_of_the_text() -> None:
    proposer = NgramProposer()
    begun(proposer, [5, 6, 5, 6, 5, 6])
    draft = proposer.propose(0, 5)
    assert draft is not None and draft.tokens == [5, 6, 5, 6, 5]


def test_the_longest_match_is_preferred_to_the_latest() -> None:
    index = TextIndex(100)
    index.extend([8, 1, 2, 3, 40, 9, 1, 2, 3, 50, 8, 1, 2, 3])
    assert index.find(array("i", [8, 1, 2, 3]), own=True) == Match(4, 4)


def test_a_short_text_that_is_scanned_has_the_matches_of_an_index() -> None:
    draw = random.Random(3)
    for case in range(400):
        vocab, length = draw.choice([1, 2, 3, 300, 70_000]), draw.randrange(1, 120)
        text = [draw.randrange(vocab) for _ in range(length)]
        text += text[: draw.randrange(length)]
        ngram = 1 + case % 4
        scanned, index = ScannedText(ngram), TextIndex(10_000, ngram)
        index.reserve(1 << 18)  # no two n-grams have one hash
        scanned.extend(array("i", text))
        index.extend(text)
        found = scanned.find()
        assert found == index.find(array("i", text[-MOST_MATCH:]), own=True)
        if found is not None:
            for count in (1, 5, 50):
                assert scanned.after(found.at, count) == index.after(found.at, count, own=True)


def test_a_text_that_grows_long_is_indexed_and_found_as_before() -> None:
    proposer, text = NgramProposer(), [*range(MOST_SCANNED - 2), 5, 6]
    begun(proposer, text)
    assert proposer.propose(0, 2) is None
    proposer.took(0, [7])
    found = []
    for _ in range(4):
        proposer.next_step()
        found.append(proposer.propose(0, 2))
    assert found[0] is None, "it is indexed a piece a step"
    assert found[-1] is not None and found[-1].tokens == [8, 9]


def test_bytes_between_tokens_match_nothing_and_are_passed_over() -> None:
    scanned = ScannedText(1)
    scanned.extend(array("i", [256, 1, *[1 << 24, 0] * 9, 1]))
    assert scanned.find() == Match(2, 1)
    hostile = ScannedText(1)
    hostile.extend(array("i", [1, *[1 << 16] * 99, 1]))
    assert hostile.find() is None, "a search ends"


def test_outputs_are_found_by_their_corpus_alone_and_never_joined() -> None:
    proposer = SuffixProposer(most_finished=4_000)
    for slot, corpus in enumerate((b"a", b"b")):
        begun(proposer, [1], slot, corpus)
        proposer.took(slot, [10 + slot, 11, 12, 13, 14, 15, 16, 17])
        proposer.forget(slot)
    proposer.next_step()
    begun(proposer, [3, 11, 12, 13], corpus=b"a")
    draft = proposer.propose(0, 20)
    assert draft is not None and draft.source == "finished"
    assert draft.tokens == [14, 15, 16, 17]
    begun(proposer, [3, 11, 12, 13], corpus=b"c")
    assert proposer.propose(0, 20) is None


def test_what_was_used_least_recently_goes_first_and_no_corpus_has_all() -> None:
    kept = FinishedOutputs(most=400)
    kept.add(b"large", list(range(1_000)))
    kept.index(1_000)
    index = kept.of(b"large")
    assert index is not None and len(index) == 100
    for name in (b"1", b"2", b"3", b"4"):
        kept.add(name, list(range(99)))
        kept.index(100)
    assert kept.of(b"large") is None and kept.of(b"1") is not None
    assert kept.num_tokens == 400


@pytest.mark.parametrize("name", texts(1))
@pytest.mark.parametrize("ngram", [1, 3, 4])
def test_one_by_one_and_many_at_once_find_the_same(name: str, ngram: int) -> None:
    text = texts(700, vocab=20)[name]
    single, bulk = TextIndex(300, ngram), TextIndex(300, ngram)
    for token in text:
        single.append(token)
    at = 0
    for part in (1, 3, 90, 2, 250, 200, 150, 4):
        bulk.extend(text[at : at + part])
        at += part
    assert single.tokens == bulk.tokens and single.end == bulk.end
    for end in range(310, 700):
        asked = array("i", text[end - 2 * MOST_MATCH : end])
        assert single.find(asked) == bulk.find(asked)


def test_a_table_is_widened_in_pieces_and_texts_are_found_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hashed: list[int] = []
    right: list[bool] = []
    hashes = TextIndex._hashes

    def counted(index: TextIndex, tokens: Tokens) -> npt.NDArray[np.int64]:
        hashed.append(len(tokens))
        return hashes(index, tokens)

    monkeypatch.setattr(TextIndex, "_hashes", counted)
    text, index, piece = texts(40_000)["random"], TextIndex(30_000), 1_000
    for begin in range(0, len(text), piece):
        hashed.clear()
        index.extend(text[begin : begin + piece])
        assert sum(hashed) <= 5 * 2_048
        for end in (begin + piece - 1, begin + 7, begin - 5_100, begin - 28_100):
            if end > MOST_MATCH:
                found = index.find(array("i", text[end - MOST_MATCH : end]))
                right.append(found is not None and found.at == end % 30_000)
    assert len(right) > 100 and right.count(False) <= 2, "few chains are longer than a search"


@pytest.mark.parametrize("name", texts(1))
def test_what_is_found_stands_there(name: str) -> None:
    text = texts(2_000, vocab=9)[name]
    index = TextIndex(5_000)
    for end, (token, following) in enumerate(pairwise(text), 1):
        index.append(token)
        found = index.find(array("i", text[max(0, end - 40) : end]), own=True)
        if found is not None:
            length = found.length
            assert text[found.at - length : found.at] == text[end - length : end]
            assert found.at < end
        assert following != END


@pytest.mark.parametrize("name", texts(1))
def test_a_step_costs_the_same_whatever_and_however_long_the_text(name: str) -> None:
    most = 0
    for length in (500, 20_000):
        proposer = SuffixProposer(most_finished=200_000)
        text = texts(length + 50)[name]
        begun(proposer, text)
        proposer.took(0, text)
        proposer.forget(0)
        begun(proposer, text[:length])
        for _ in range(0, 2 * length, MOST_INDEXED // 2):  # what it began with is indexed
            proposer.next_step()
            proposer.propose(0, 8)
        for token in text[length:]:
            proposer.took(0, [token])
            most = max(most, instructions(lambda: proposer.propose(0, 8)))  # noqa: B023
    # A place costs a hundred instructions or two; there are two indexes of ``DEPTH`` places.
    assert most < 400 * 2 * DEPTH


@pytest.mark.parametrize("name", texts(1))
def test_twenty_bytes_a_token_are_the_most(name: str) -> None:
    kept = FinishedOutputs(most=400_000)
    text = texts(2_000)[name]
    for _ in range(60):
        kept.add(b"a", text)
        kept.index(len(text))
    # 20,000,000 tokens, 10,000 outputs of 2,000, are then less than 400 MB.
    assert kept.num_bytes <= 20 * 100_000


def test_a_step_indexes_a_bounded_piece_of_all_long_texts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And drafts of a text are made once all of it is indexed, as if it had been at once."""
    pieces: list[int] = []
    extend = TextIndex.extend

    def counted(index: TextIndex, more: array[int]) -> None:
        pieces.append(len(more))
        extend(index, more)

    monkeypatch.setattr(TextIndex, "extend", counted)
    proposer, text = SuffixProposer(most_finished=100_000), texts(9_000)["random"]
    begun(proposer, [1], slot=5)
    proposer.took(5, text[:5_000])
    proposer.forget(5)
    for slot in (0, 1):
        begun(proposer, [*text, *text[100:110]], slot)
    begun(proposer, [*text[:20], *text[:5]], slot=2)
    steps = 0
    while (draft := proposer.propose(1, 4)) is None:
        assert sum(pieces) <= MOST_INDEXED + 32
        pieces.clear()
        proposer.next_step()
        proposer.propose(0, 4)
        short = proposer.propose(2, 4)
        assert short is not None and short.tokens == text[5:9], "it does not wait for the others"
        steps += 1
    assert draft.tokens == text[110:114]
    assert 2 * 9_000 // MOST_INDEXED <= steps <= 3 * 9_000 // MOST_INDEXED


def test_what_single_steps_draw_is_shown_in_its_order_before_slots_change() -> None:
    proposer = NgramProposer()
    drafting = Drafting(proposer, 4, DraftBudget(8))
    prompt = np.array([1], "<i4").tobytes()
    added = [NewSlot(slot, prompt, 1, 0, [], b"", corpus=b"a") for slot in (0, 2)]
    drafting.begin(StepPlan(1, 1, True, [], added, [], []))
    for step in range(MOST_DRAWN + 3):
        drafting.drew(np.array([0, 1, 2]), np.array([step, 7, 100 + step], np.int32))
    drafting.begin(StepPlan(1, 2, False, [0], [], [], []))
    assert proposer._texts.keys() == {2}
    assert proposer._texts[2].output.tolist() == [100 + step for step in range(MOST_DRAWN + 3)]
