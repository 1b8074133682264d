from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.counted import instructions
from support.growth import LINEAR, sixteenfold

from penstock.services.tokenizer.stop_strings import StopStrings, stop_automaton

SMALL = st.text(alphabet="ab\n", max_size=40)
STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=4)


def whole(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The plain rule: cut the text where a stop string is first complete, the longest one there."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


def streamed(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    watched = StopStrings(stops)
    released = []
    for piece in pieces:
        released.append(watched.push(piece))
        if watched.found is not None:
            return "".join(released), watched.found
    return "".join(released) + watched.flush(), None


@given(text=SMALL, stops=STOPS, data=st.data())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_every_cut_of_the_text_gives_what_the_whole_text_gives(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    ends = [*cuts, len(text)]
    pieces = [text[a:b] for a, b in zip([0, *cuts], ends, strict=True)]
    assert streamed(pieces, stops) == whole(text, stops)
    assert streamed(list(text), stops) == whole(text, stops)


@given(text=SMALL, stops=STOPS)
@settings(max_examples=120, deadline=None, derandomize=True)
def test_exactly_what_may_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    watched = StopStrings(stops)
    seen = released = ""
    for character in text:
        seen += character
        released += watched.push(character)
        if watched.found is not None:
            return
        beginnings = [stop[:n] for stop in stops for n in range(1, len(stop))]
        held = max((len(b) for b in beginnings if seen.endswith(b)), default=0)
        assert released == seen[: len(seen) - held]


def test_the_first_of_several_stop_strings_wins() -> None:
    assert streamed(["one two", " three"], ["three", "two"]) == ("one ", "two")


def test_of_overlapping_stop_strings_the_one_completed_first_wins() -> None:
    assert streamed(["xabcd"], ["abcd", "bc"]) == ("xa", "bc")
    assert streamed(["xabc"], ["c", "abc"]) == ("x", "abc")


def test_a_stop_string_is_found_across_pieces_and_after_a_false_start() -> None:
    assert streamed(["a<|e", "<|en", "d|>b"], ["<|end|>"]) == ("a<|e", "<|end|>")


def test_characters_with_meaning_in_patterns_are_taken_as_they_are() -> None:
    assert streamed(["a]b^c-d\\e"], ["^c"]) == ("a]b", "^c")
    assert streamed(["a]b^c-d\\e"], ["]", "\\"]) == ("a", "]")
    assert streamed(["naïve 😀!"], ["😀"]) == ("naïve ", "😀")


def test_nothing_is_held_back_where_nothing_can_match() -> None:
    watched = StopStrings(["###"])
    assert watched.push("plain text") == "plain text"
    assert watched.push("#") == ""
    assert watched.push("x") == "#x"


@pytest.mark.parametrize("stop", ["a" * 512, "ab" * 256])
def test_time_is_linear_in_the_text(stop: str) -> None:
    def seconds(repetitions: int) -> float:
        text = (stop[:-1] + "c") * repetitions
        watched = StopStrings([stop])
        begin = time.process_time()
        for start in range(0, len(text), 4):
            watched.push(text[start : start + 4])
        return time.process_time() - begin

    assert sixteenfold(seconds, 100) < LINEAR


def test_the_most_and_longest_stop_strings_allowed_are_ready_quickly() -> None:
    """A million instructions are 12 ms."""
    stops = [chr(97 + n) * 511 + "!" for n in range(16)]
    stop_automaton.cache_clear()
    assert instructions(lambda: StopStrings(stops)) < 300 * len("".join(stops))
