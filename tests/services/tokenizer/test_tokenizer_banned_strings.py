"""Banned strings: what their guard holds back, where it goes back to, and what is drawn then."""

from __future__ import annotations

import math
import random
from array import array
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.protocol.logprobs import PackedLogprobs, entry_bytes
from penstock.protocol.ownership.guard import NO_EXTRAS, TokenExtras
from penstock.protocol.sampler_parameters import MAX_REDRAWS
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.wire.messages.requests import PromptText
from penstock.protocol.wire.messages.steps import SlotAdjustments, SlotSampling
from penstock.protocol.wire.messages.tokens import End, EndReason, RowLogprobs, RowStart
from penstock.services.tokenizer.banned_strings import BannedStrings
from penstock.services.tokenizer.text_model import TextModel

MODEL = TextModel.load(Path(__file__).parents[3] / "demo" / "model")
LENGTH = End(0, EndReason.LENGTH)


@cache
def ids(text: str) -> list[int]:
    encoded = MODEL.encode_prompt(PromptText(text, add_special_tokens=False))
    return memoryview(encoded).cast("i").tolist()


def text_of(tokens: list[int]) -> str:
    return str(MODEL.tokenizer.decode(tokens))


def letter(character: str) -> int:
    (token,) = ids(character)
    return token


def row(*tokens: int) -> memoryview:
    return memoryview(array("i", tokens).tobytes()).cast("i")


def guard(*banned: str, **params: Any) -> BannedStrings:
    sampling = SlotSampling(1.0, 0, 1.0, 7).packed()
    asked = SamplingParams(banned_strings=list(banned), **params)
    return BannedStrings(MODEL, asked, sampling, with_stops=True)


def passed(one: BannedStrings, *tokens: int, end: End | None = None) -> str | None:
    """The text of the tokens that go on; ``None``: the choice goes back."""
    found = one.take(row(*tokens), TokenExtras(end=end) if end else NO_EXTRAS)
    return None if found.again else text_of(found.tokens.tolist())


def asked(one: BannedStrings) -> SlotSampling:
    return msgspec.msgpack.decode(one.sampling(), type=SlotSampling)


def bans(one: BannedStrings) -> tuple[str, int]:
    adjustments = asked(one).adjustments or SlotAdjustments()
    return text_of(array("i", adjustments.banned).tolist()), adjustments.banned_until


def drawn(one: BannedStrings) -> str:
    return text_of(array("i", one.drawn()).tolist())


def test_what_may_become_a_banned_string_is_held_back_until_it_cannot() -> None:
    one = guard("cab")
    told = [passed(one, letter(character)) for character in "xccacax"]
    assert told == ["x", "", "c", "", "ca", "", "cax"]
    assert (one.held, one.sampling()) == (0, b"")


def test_a_complete_string_goes_back_to_its_first_token_which_is_banned_there() -> None:
    one = guard("cab")
    assert [passed(one, letter(character)) for character in "xca"] == ["x", "", ""]
    assert passed(one, letter("b"), letter("x")) is None
    assert (drawn(one), one.held) == ("x", 0)
    assert bans(one) == ("c", 2)
    assert asked(one).seed != 7


def test_every_first_token_that_has_brought_a_string_stays_banned_at_its_place() -> None:
    one = guard("ab", "cb")
    for character in "ab":
        passed(one, letter(character))
    assert bans(one) == ("a", 1)
    for character in "cb":
        passed(one, letter(character))
    assert bans(one) == ("ac", 1)
    assert passed(one, letter("x")) == "x"
    assert bans(one) == ("", 0)


def test_the_case_does_not_matter_and_a_string_may_begin_within_a_token() -> None:
    (token,) = ids(" the")
    one = guard("HEX")
    assert passed(one, letter("x"), token) == "x"
    assert passed(one, letter("X")) is None
    assert (drawn(one), bans(one)) == ("x", (" the", 2))


def test_a_string_that_the_end_completes_goes_back_too_and_the_end_is_forgotten() -> None:
    one = guard("ab")
    assert passed(one, letter("a")) == ""
    assert passed(one, letter("b"), end=LENGTH) is None
    assert passed(one, letter("x"), end=LENGTH) == "x"


def test_what_is_open_at_the_end_goes_out() -> None:
    one = guard("abc")
    assert passed(one, letter("a"), letter("b"), end=LENGTH) == "ab"


def test_a_character_of_several_tokens_goes_back_to_the_first_of_them() -> None:
    tokens = ids("𝄞")
    assert len(tokens) > 1
    one = guard("𝄞")
    assert [passed(one, token) for token in tokens[:-1]] == [""] * (len(tokens) - 1)
    assert passed(one, tokens[-1]) is None
    assert one.drawn() == b""


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_that_ends_no_later_keeps_a_banned_string_out(include: bool) -> None:
    tokens = [letter(character) for character in "abc"]
    one = guard("abcd", stop=["bc"], include_stop_str_in_output=include)
    assert passed(one, *tokens, letter("d")) == "abcd"  # of which the stream takes what counts
    one = guard("abc", stop=["bc"], include_stop_str_in_output=include)
    assert passed(one, *tokens) == (None if include else "abc")
    one = guard("abc", stop=["bc"], min_tokens=3)
    assert passed(one, *tokens) is None


def test_a_choice_that_has_gone_back_too_often_ends_before_the_string() -> None:
    one = guard("ab")
    for _ in range(MAX_REDRAWS):
        assert passed(one, letter("a"), letter("b")) is None
    assert passed(one, letter("x")) == "x"
    found = one.take(row(letter("a"), letter("b")), NO_EXTRAS)
    assert (found.tokens.tolist(), found.more.end) == ([], End(0, EndReason.LENGTH, "ab"))


def test_what_comes_beside_held_tokens_is_held_and_forgotten_with_them() -> None:
    size = entry_bytes(0)

    def more(count: int, start: bool = False) -> TokenExtras:
        logprobs = PackedLogprobs(0, bytes([count]) * (count * size))
        prompt = PackedLogprobs(0, b"prompt") if start else None
        return TokenExtras(
            RowStart(0, 1, 0.5) if start else None, None, RowLogprobs(0, logprobs, prompt)
        )

    one = guard("cab")
    assert one.take(row(letter("c")), more(1, start=True)).more == NO_EXTRAS
    first = one.take(row(letter("x"), letter("c")), more(2)).more
    assert first.start is not None and first.logprobs is not None and first.logprobs.tokens
    assert first.logprobs.tokens.entries == bytes([1]) * size + bytes([2]) * size
    assert first.logprobs.prompt == PackedLogprobs(0, b"prompt")
    assert one.take(row(letter("a"), letter("b")), more(2)).again
    last = one.take(row(letter("x")), more(1)).more
    assert last.logprobs is not None and last.logprobs.tokens is not None
    assert last.logprobs.tokens.entries == bytes([1]) * size


# --- against a model whose draws are keyed by seed and position

LETTERS = "abcde"


def draw(seed: int, output: list[int], banned: set[int]) -> int:
    """The highest of scores that depend on seed, position and token alone."""
    position = len(output)

    def score(token: int) -> float:
        return -math.log(-math.log(random.Random(f"{seed} {position} {token}").random()))

    return max((token for token in map(letter, LETTERS) if token not in banned), key=score)


def written(one: BannedStrings, seed: int, length: int, begun: list[int] | None = None) -> str:
    """What comes of a choice, checked at each step: also of one that another guard began."""
    out = begun or []
    while len(out) < length:
        output = array("i", one.drawn()).tolist()
        sampling = asked(one) if one.sampling() else SlotSampling(1.0, 0, 1.0, seed)
        adjustments = sampling.adjustments or SlotAdjustments()
        banned = set(array("i", adjustments.banned)) if adjustments.banned else set()
        token = draw(
            sampling.seed, output, banned if len(output) < adjustments.banned_until else set()
        )
        end = LENGTH if len(output) + 1 == length else None
        found = one.take(row(token), TokenExtras(end=end))
        out += found.tokens.tolist()
        if not found.again and end is not None:
            break
    return text_of(out)


def seeded(seed: int, *banned: str) -> BannedStrings:
    sampling = SlotSampling(1.0, 0, 1.0, seed).packed()
    params = SamplingParams(banned_strings=list(banned))
    return BannedStrings(MODEL, params, sampling, with_stops=True)


def exact(banned: str, length: int) -> dict[str, float]:
    """The distribution of texts of letters that are equally likely, found by going through all
    that can happen."""
    found: Counter[str] = Counter()

    def follow(text: str, gone_on: int, out: dict[int, str], share: float) -> None:
        left = [one for one in LETTERS if one not in out.get(len(text), "")]
        for one in left:
            now, part = text + one, share / len(left)
            if now.endswith(banned):
                begin = max(gone_on, len(now) - len(banned))
                known = {at: gone for at, gone in out.items() if at <= begin}
                known[begin] = known.get(begin, "") + now[begin]
                follow(now[:begin], gone_on, known, part)
            elif len(now) == length:
                found[now] += part
            else:
                follow(now, len(now) - now.endswith(banned[0]), out, part)

    follow("", 0, {}, 1.0)
    return found


def test_redraws_follow_the_models_distribution_without_the_banned_token() -> None:
    expected, count = exact("ab", 3), 3000
    found = Counter(written(seeded(seed, "ab"), seed, 3) for seed in range(count))
    assert set(found) <= set(expected)
    squares = sum((found[one] - count * p) ** 2 / (count * p) for one, p in expected.items())
    freedom = len(expected) - 1
    assert squares < freedom + 4 * math.sqrt(2 * freedom)


def test_a_guard_that_goes_on_elsewhere_comes_to_the_same_text() -> None:
    for seed in range(12):
        whole = written(seeded(seed, "ab", "cca"), seed, 24)
        assert "ab" not in whole and "cca" not in whole and len(whole) == 24
        one, cuts = seeded(seed, "ab", "cca"), set[int]()
        out: list[int] = []
        while len(out) < 24:
            cut = len(out)
            if cut not in cuts:
                cuts.add(cut)
                other = seeded(seed, "ab", "cca")
                other.replay(row(*out), one.redraws)
                assert written(other, seed, 24, list(out)) == whole
            output = array("i", one.drawn()).tolist()
            sampling = asked(one) if one.sampling() else SlotSampling(1.0, 0, 1.0, seed)
            gone = (sampling.adjustments or SlotAdjustments()).banned
            token = draw(sampling.seed, output, set(array("i", gone)))
            last = len(output) == 23
            out += one.take(row(token), TokenExtras(end=LENGTH if last else None)).tokens.tolist()
