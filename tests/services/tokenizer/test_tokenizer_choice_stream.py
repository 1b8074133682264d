from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.loadtest.models.make_model import make_model
from penstock.protocol.logprobs import PackedLogprobs
from penstock.protocol.ownership.choice import Choice
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.wire.messages.tokens import Event, Released, RowLogprobs, Text, Vector
from penstock.services.tokenizer.choice_stream import ChoiceStream
from penstock.services.tokenizer.pooled_stream import PooledStream
from penstock.services.tokenizer.text_model import TextModel


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    folder: Path = make_model(tmp_path_factory.mktemp("choice") / "model")
    return TextModel.load(folder)


def ids_of(model: TextModel, text: str) -> list[int]:
    return array("i", model.encode(text, add_special_tokens=False)).tolist()


def test_tokens_become_text_one_by_one(model: TextModel) -> None:
    stream = ChoiceStream(model, SamplingParams(stop=[]))
    text = "Water flows 😀 through.\n"
    deltas = [stream.push([token]) for token in ids_of(model, text)]
    assert "".join(delta.content for delta in deltas) == text
    assert all(delta.used == 1 and delta.stop is None for delta in deltas)
    assert stream.finish() == ""


def test_rows_may_be_memoryviews_arrays_or_lists(model: TextModel) -> None:
    ids = ids_of(model, "the same text")
    rows = (ids, array("i", ids), memoryview(array("i", ids)), memoryview(array("i", ids))[:])
    assert {ChoiceStream(model, SamplingParams(stop=[])).push(row).content for row in rows} == {
        "the same text"
    }


def test_tokens_after_a_stop_string_are_dropped_and_not_used(model: TextModel) -> None:
    ids = ids_of(model, "abc") + ids_of(model, "!!") + ids_of(model, "more")
    stream = ChoiceStream(model, SamplingParams(stop=["!!"]))
    delta = stream.push(ids)
    assert (delta.content, delta.stop) == ("abc", "!!")
    assert delta.used == len(ids_of(model, "abc")) + len(ids_of(model, "!!"))
    assert stream.push([5, 6]).used == 0
    assert stream.finish() == ""


def test_the_token_that_ended_the_choice_is_used_but_not_rendered(model: TextModel) -> None:
    ids = ids_of(model, "ab")
    for stop in ([], ["zz"]):
        stream = ChoiceStream(model, SamplingParams(stop=stop))
        delta = stream.push([*ids, ids_of(model, "!")[0]], True)
        assert (delta.content, delta.used, delta.stop) == ("ab", len(ids) + 1, None)
        assert stream.push(ids_of(model, "c"), True).content == ""


def test_a_held_beginning_of_a_stop_string_is_released_at_the_end(model: TextModel) -> None:
    stream = ChoiceStream(model, SamplingParams(stop=["###"]))
    assert stream.push(ids_of(model, "a")).content == "a"
    assert stream.push(ids_of(model, "#")).content == ""
    assert stream.finish() == "#"


def test_an_unfinished_character_at_the_end_can_complete_a_stop_string(model: TextModel) -> None:
    stream = ChoiceStream(model, SamplingParams(stop=["\ufffd"]))
    stream.push(ids_of(model, "a😀")[:-1])
    assert stream.finish() == ""
    assert stream.stop == "\ufffd"


@given(
    ids=st.lists(st.integers(0, 511), max_size=30),
    stops=st.lists(st.sampled_from(["e", "th", "\n\n", "ab", "\ufffd"]), max_size=3),
    data=st.data(),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_a_continuation_anywhere_gives_the_same_text_and_end(
    model: TextModel, ids: list[int], stops: list[str], data: st.DataObject
) -> None:
    whole = ChoiceStream(model, SamplingParams(stop=stops))
    delta = whole.push(ids)
    text, used = delta.content + whole.finish(), delta.used

    cut = data.draw(st.integers(0, len(ids)))
    first = ChoiceStream(model, SamplingParams(stop=stops))
    before = first.push(ids[:cut])
    second = ChoiceStream(model, SamplingParams(stop=stops))
    known = memoryview(array("i", ids[:cut]))
    assert Choice(second).replay(known, Released(len(before.content))) == ""
    after = second.push(ids[cut:])
    assert before.content + after.content + second.finish() == text
    assert before.used + after.used == used
    assert second.stop == whole.stop


def test_replay_returns_what_the_client_does_not_have_yet(model: TextModel) -> None:
    choice = Choice(ChoiceStream(model, SamplingParams(stop=[])))
    known = memoryview(array("i", ids_of(model, "hello there")))
    assert choice.replay(known, Released(6)) == "there"


def offsets_of(stream: ChoiceStream, row: list[int], *, first: bool) -> list[int]:
    """Where the tokens of a row begin in the text; their values are of no interest here."""
    words = [word for token in row for word in (token, 1, 0)]
    packed = PackedLogprobs(0, array("i", words).tobytes())
    details = stream.details(0, first, row, RowLogprobs(0, packed))
    assert details is not None and details.tokens is not None
    return details.tokens.offsets


@given(ids=st.lists(st.integers(0, 511), max_size=30), data=st.data())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_offsets_go_on_after_a_continuation(
    model: TextModel, ids: list[int], data: st.DataObject
) -> None:
    params = SamplingParams(stop=[], logprobs=0)
    whole = ChoiceStream(model, params)
    expected = []
    for token in ids:
        whole.push([token])
        expected += offsets_of(whole, [token], first=not expected)
    cut = data.draw(st.integers(0, len(ids)))
    second = ChoiceStream(model, params)
    second.replay(ids[:cut])
    second.push(ids[cut:])
    assert offsets_of(second, ids[cut:], first=False) == expected[cut:]


class MadeUpTask:
    """A task of another package, which makes an event of its own kind."""

    name = "made-up"

    def __init__(self, event: Any) -> None:
        self._event = event

    def pool(self, hidden: Any) -> bytes:
        return b""

    def event(self, values: bytes) -> Event:
        event: Event = self._event
        return event


@pytest.mark.parametrize("wrong", [Vector([0.5]), Text("a"), "a", None])  # type: ignore[arg-type]
def test_a_task_whose_event_no_message_can_carry_fails_at_its_own_request(wrong: Any) -> None:
    with pytest.raises(TypeError, match="made-up"):
        PooledStream(MadeUpTask(wrong)).pooled(b"")
    right = PooledStream(MadeUpTask(Vector(b"\0" * 4)))
    assert right.pooled(b"") == Vector(b"\0" * 4)


def test_a_request_that_generates_takes_nothing_that_a_task_has_made(model: TextModel) -> None:
    with pytest.raises(TypeError, match="generates"):
        ChoiceStream(model, SamplingParams()).pooled(b"")
