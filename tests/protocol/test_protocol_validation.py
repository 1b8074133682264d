"""What a declaration accepts is what msgspec accepts, but for nulls and what asks for nothing."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Meta

from penstock.protocol.declared import NO_ITEMS, Declared, SameAs, describe
from penstock.protocol.suggestions import ForeignNames
from penstock.protocol.validation import MAX_WRONG, InvalidValue, check_text, read


class Inner(Declared, kw_only=True):
    NEUTRAL: ClassVar[dict[str, Any]] = {"later": (0, "off")}

    kind: Literal["a", "b"]
    size: Annotated[int, Meta(ge=1, le=9)] | None = None


class Outer(Declared, kw_only=True):
    NEUTRAL: ClassVar[dict[str, Any]] = {
        "tools": NO_ITEMS,
        "best": SameAs("count", 1),
        "count": (False,),
    }
    FOREIGN: ClassVar[ForeignNames] = ForeignNames({"number": "count"}, {"old": "it is gone"})

    items: Annotated[list[Inner], Meta(max_length=3)]
    count: Annotated[int, Meta(ge=0, le=5)] | None = None
    share: Annotated[float, Meta(gt=0, le=1)] | None = None
    names: str | Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(max_length=2)] | None = (
        None
    )
    weights: dict[int, float] | None = None
    inner: Inner | None = None


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 10) | st.sampled_from([0.5, "", "a", "b", 10**30]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["kind", "size", "later", "1", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)
INNER = st.fixed_dictionaries(
    {}, optional={"kind": st.sampled_from(["a", "c"]), "size": VALUES, "later": VALUES}
)
OUTER = st.fixed_dictionaries(
    {"items": st.lists(INNER, max_size=4) | VALUES},
    optional={
        "count": VALUES, "share": VALUES, "names": VALUES, "weights": VALUES, "inner": INNER,
        "tools": VALUES, "best": VALUES, "new": VALUES,
    },
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(OUTER)
def test_what_msgspec_accepts_is_read_alike_and_anything_else_is_read_or_explained(
    value: dict[str, Any],
) -> None:
    raw = msgspec.json.encode(value)
    try:
        strict: Outer | None = msgspec.json.decode(raw, type=Outer)
    except msgspec.ValidationError:
        strict = None
    try:
        found = read(msgspec.json.decode(raw), Outer)
    except InvalidValue as error:
        assert strict is None
        invalid: InvalidValue | None = error
    else:
        invalid = None
        assert strict is None or found == strict
        assert msgspec.convert(msgspec.to_builtins(found, str_keys=True), Outer, str_keys=True)
    if invalid is not None:
        assert invalid.param.partition(".")[0] in {*value, "items"}
        assert "\n" not in invalid.message
        assert len(invalid.message) < 150 * 8


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ({}, "items is missing; an array of at most 3 objects is required"),
        ({"items": 5}, "items is 5; an array of at most 3 objects is allowed"),
        ({"items": [{}] * 4}, "items has 4 items; at most 3 are allowed"),
        ({"items": [{"kind": "a"}, {"kind": "c"}]}, "items[1].kind is 'c'; 'a' or 'b' is allowed"),
        ({"items": [{"kind": "a", "size": 0}]}, "items[0].size is 0; 1 to 9 is allowed"),
        (
            {"items": [{"size": 0}], "count": -1, "share": 2, "names": []},
            "items[0].kind is missing; 'a' or 'b' is required; items[0].size is 0; 1 to 9 is "
            "allowed; count is -1; 0 to 5 is allowed; share is 2; above 0 and at most 1 is allowed",
        ),
        ({"items": [], "share": 0}, "share is 0; above 0 and at most 1 is allowed"),
        ({"items": [], "count": True}, "count is true; a whole number from 0 to 5 is allowed"),
        ({"items": [], "names": [""]}, "names[0] is empty; a string that is not empty is allowed"),
        ({"items": [], "weights": {"x": 1}}, "weights has the key 'x'; a whole number is allowed"),
        ({"items": [], "weights": {"1": "x"}}, "weights['1'] is 'x'; a number is allowed"),
        ({"items": [], "tools": 0}, "tools is 0; an array is allowed"),
        ({"items": [], "best": 2}, "not supported yet: best"),
        (
            {"items": [], "inner": {"kind": "a", "sise": 1, "later": 1}},
            "unknown parameter in inner: sise (did you mean size?); known are kind, size; "
            "not supported yet in inner: later",
        ),
        (
            {"items": [], "cuont": 1, "number": 2, "old": 3, "zzz": 4},
            "unknown parameters: cuont (did you mean count?), number (use count), "
            "old (it is gone), zzz",
        ),
        ({"items": [], "cuont": 1, "share": 0},
         "unknown parameter: cuont (did you mean count?); share is 0; above 0 and at most 1 is "
         "allowed"),
        ({"itmes": []},
         "unknown parameter: itmes (did you mean items?); items is missing; an array of at most 3 "
         "objects is required"),
        ({"items": [{"kind": "a", "sise": 1, "size": 0}], "best": 2},
         "not supported yet: best; unknown parameter in items[0]: sise (did you mean size?); known "
         "are kind, size; items[0].size is 0; 1 to 9 is allowed"),
        ({"items": [], "names": ["a", "\ud800"], "cuont": 1},
         "unknown parameter: cuont (did you mean count?)"),
        ({"items": "\ud800"},
         "items is '\\ud800', which holds half of a surrogate pair; remove it, or encode it with "
         "its other half as one character"),
        ({"items": [{"kind": "a\ud800"}]},
         "items[0].kind is 'a\\ud800', which holds half of a surrogate pair; remove it, or encode "
         "it with its other half as one character"),
    ],
)  # fmt: skip
def test_the_sentence_names_the_place_the_value_and_what_is_allowed(
    value: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidValue) as caught:
        read(value, Outer)
    assert caught.value.message == sentence


def test_so_many_wrong_fields_are_explained_and_the_others_counted() -> None:
    wide = msgspec.defstruct("Wide", [(f"f{n}", int, 0) for n in range(11)], bases=(Declared,))
    for wrong, rest in ((8, ""), (9, "; and 1 more is wrong"), (11, "; and 3 more are wrong")):
        with pytest.raises(InvalidValue) as caught:
            read({f"f{n}": "x" for n in range(wrong)}, wide)
        told = [f"f{n} is 'x'; a whole number is allowed" for n in range(MAX_WRONG)]
        assert caught.value.message == "; ".join(told) + rest
        assert caught.value.param == "f0"


def test_nulls_and_what_asks_for_nothing_are_left_out() -> None:
    value = {
        "items": [{"kind": "a", "size": None, "later": "off", "x": None}],
        "count": 2,
        "best": 2,
        "tools": [],
        "inner": None,
    }
    assert read(value, Outer) == Outer(items=[Inner(kind="a")], count=2)
    assert read({"items": [], "count": False}, Outer) == Outer(items=[])
    assert read({"items": [], "best": 1}, Outer) == Outer(items=[])


def test_a_wrong_one_among_many_is_found_by_its_place() -> None:
    with pytest.raises(InvalidValue, match=r"x\[77777\] is 'y'; a whole number is allowed"):
        read([*range(77777), "y", *range(100_000)], list[int], "x")


def test_half_of_a_surrogate_pair_is_found_by_its_place() -> None:
    check_text({"a": ["b", 1, None, "\U0001f600"]}, "x")
    with pytest.raises(InvalidValue, match=r"^x\.a\[1\] is 'b\\ud83d', which holds half") as caught:
        check_text({"a": ["b", "b\ud83d"]}, "x")
    assert caught.value.param == "x.a"
    with pytest.raises(InvalidValue, match=r"^a name in x is '\\ud83d', which holds half"):
        check_text({"\ud83d": 1}, "x")


def test_types_are_described_in_words() -> None:
    assert describe(int | None) == "a whole number"
    assert describe(Annotated[float, Meta(ge=2)]) == "a number of at least 2"
    assert describe(Annotated[float, Meta(gt=2)]) == "a number above 2"
    assert describe(str | list[int]) == "a string or an array of whole numbers"
