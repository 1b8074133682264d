"""The depth check against a slow and obvious reader of JSON."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.protocol.shown_values import show
from penstock.services.frontend.body import MAX_DEPTH, check_depth, decode_object
from penstock.services.frontend.errors import ApiError

STRINGS = st.text(alphabet='[]{}"\\a,:\n', max_size=20)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.integers() | STRINGS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(STRINGS, inner, max_size=4),
    max_leaves=20,
)


def wrap(value: Any, times: int) -> Any:
    for number in range(times):
        value = [value] if number % 2 else {"k": value, "other]}": "[[[["}
    return value


def depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth, value), default=0)
    return 0


@settings(max_examples=150, deadline=None)
@given(VALUES, st.integers(min_value=55, max_value=66), STRINGS)
def test_bodies_are_refused_exactly_when_they_are_nested_too_deep(
    inner: Any, times: int, key: str
) -> None:
    value = {key: wrap(inner, times)}
    body = json.dumps(value).encode()
    if depth(value) > MAX_DEPTH:
        with pytest.raises(ApiError, match="64"):
            decode_object(body)
    else:
        assert decode_object(body) == {k: v for k, v in value.items() if v is not None}


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200) | st.text(alphabet='[]{}"\\a1,:', max_size=300).map(str.encode))
def test_any_bytes_are_decoded_or_refused_with_a_400(body: bytes) -> None:
    try:
        decoded = decode_object(body)
    except ApiError as error:
        decoded = {"status": error.status}
    assert decoded.get("status", 400) == 400


@pytest.mark.parametrize(
    "body",
    [b"[" * 8_000_000, b'"' * 8_000_000, b"\\" * 8_000_000, b"[]" * 4_000_000, b'"["' * 2_600_000],
    ids=["open", "quotes", "escapes", "pairs", "strings"],
)
def test_the_check_is_quick_on_hostile_bodies_of_full_size(body: bytes) -> None:
    started = time.process_time()
    try:
        check_depth(body)
    except ApiError:
        pass
    assert time.process_time() - started < 2.0


@pytest.mark.parametrize(
    "value",
    ["x" * 10_000, 10**5000, -(10**5000), [1] * 1000, {"a": 1}, 1e308, None, True, "\u202e\x00"],
    ids=lambda value: type(value).__name__,
)
def test_values_are_shown_in_a_few_printable_characters(value: Any) -> None:
    shown = show(value)
    assert len(shown) < 400
    assert shown.isprintable()
