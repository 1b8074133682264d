"""DRY and no-repeat-ngram: by their definitions, token by token, in bounded work."""

from __future__ import annotations

import time

import numpy as np
import pytest

from penstock.kernels.sampling import dry, no_repeat_ngram
from penstock.kernels.sampling.suffix_matches import SuffixMatches, TokenMarks, z_lengths

MARKS = TokenMarks()
LONG = 32_768


def penalised(z: np.ndarray, matches: SuffixMatches, rule: dry.DryRule) -> np.ndarray:
    tokens, values = dry.penalties(matches, rule, MARKS)
    assert len(set(tokens.tolist())) == len(tokens)
    found = z.copy()
    found[tokens] += values
    return found


def banned(z: np.ndarray, matches: SuffixMatches, size: int) -> np.ndarray:
    found = z.copy()
    found[no_repeat_ngram.bans(matches, size, MARKS)] = -np.inf
    return found


def test_random_texts_are_penalised_by_the_definition_from_nothing_and_token_by_token() -> None:
    rng = np.random.default_rng(0)
    for trial in range(300):
        vocab, count = int(rng.integers(1, 5)), int(rng.integers(1, 90))
        text = rng.integers(0, vocab, count).astype(np.int32)
        if trial % 3 == 0:
            text[count // 2 : count // 2 * 2] = text[: count // 2]
        breakers = np.unique(rng.integers(0, vocab + 3, rng.integers(0, 3))).astype(np.int32)
        rule = dry.DryRule(
            float(rng.choice([0.3, 0.8, 40.0])), float(rng.choice([1.0, 1.3, 4.0])),
            int(rng.integers(1, 5)), int(rng.choice([0, 5, 17, 200])),
        )  # fmt: skip
        size, most = int(rng.integers(1, 6)), dry.longest_that_matters(rule)
        begun = count // 2
        grown = SuffixMatches(text[:begun], breakers, most), SuffixMatches(text[:begun], None, size)
        for token in text[begun:].tolist():
            for matches in grown:
                matches.add(token)
        whole = SuffixMatches(text, breakers, most), SuffixMatches(text, None, size)
        z = rng.standard_normal(vocab + 1)
        wanted = dry.reference(z, text.tolist(), rule, set(breakers.tolist()))
        bare = no_repeat_ngram.reference(z, text.tolist(), size)
        for unbroken, matches in (grown, whole):
            np.testing.assert_allclose(penalised(z, unbroken, rule), wanted, rtol=1e-5)
            assert (banned(z, matches, size) == bare).all()


def test_a_shorter_sequence_than_is_allowed_costs_nothing() -> None:
    rule = dry.DryRule(1.0, 2.0, 3, 0)
    text = np.array([5, 6, 7, 9, 5, 6], np.int32)
    assert not len(dry.penalties(SuffixMatches(text), rule, MARKS)[0])
    longer = SuffixMatches(np.array([4, 5, 6, 7, 9, 4, 5, 6], np.int32))
    tokens, values = dry.penalties(longer, rule, MARKS)
    assert (tokens.tolist(), values.tolist()) == ([7], [-1.0])


def test_no_sequence_goes_over_a_breaker_and_none_begins_with_one() -> None:
    rule = dry.DryRule(1.0, 2.0, 1, 0)
    text = [1, 2, 3, 4, 5, 1, 2, 3, 4]
    broken = SuffixMatches(np.array(text, np.int32), np.array([2], np.int32))
    assert dry.penalties(broken, rule, MARKS)[1].tolist() == [-2.0]  # 3 4, not 1 2 3 4
    broken.add(2)
    assert not len(broken.places)


def test_the_lengths_of_z_are_those_of_its_definition() -> None:
    text = np.array([1, 1, 2, 1, 1, 2, 1, 1, 1], np.int32)
    assert z_lengths(text) == [9, 1, 0, 5, 1, 0, 2, 2, 1]


@pytest.mark.parametrize("period", [1, 2, 64, LONG // 2])
def test_a_long_match_is_as_long_from_nothing_as_token_by_token(period: int) -> None:
    text = np.resize(np.random.default_rng(period).permutation(period), 2000).astype(np.int32)
    grown, whole = SuffixMatches(text[:40]), SuffixMatches(text)
    for token in text[40:].tolist():
        grown.add(token)
    assert grown.places.tolist() == whole.places.tolist()
    assert grown.lengths.tolist() == whole.lengths.tolist()


@pytest.mark.parametrize("period", [1, 3, 40, 1000])
def test_a_step_behind_a_long_hostile_text_is_as_much_work_as_the_text_is_long(period: int) -> None:
    """Not as its square: twice the text takes a step about twice as long, in processor time."""
    rule = dry.DryRule(0.8, 1.75, 2, 0)

    def seconds(count: int) -> float:
        text = np.resize(np.arange(period), count).astype(np.int32)
        matches = SuffixMatches(text, None, dry.longest_that_matters(rule))
        best = float("inf")
        for step in range(12):
            begun = time.thread_time()
            matches.add((count + step) % period)
            dry.penalties(matches, rule, MARKS)
            no_repeat_ngram.bans(matches, 4, MARKS)
            best = min(best, time.thread_time() - begun)
        return best

    assert seconds(4 * LONG) < 16 * seconds(LONG) + 0.001
    assert seconds(LONG) < 0.01


def test_a_hostile_text_is_taken_in_without_comparing_it_with_itself() -> None:
    begun = time.thread_time()
    SuffixMatches(np.zeros(LONG, np.int32))
    assert time.thread_time() - begun < 2.0  # its square would be 500 million comparisons
