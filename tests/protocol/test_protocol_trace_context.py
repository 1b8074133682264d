"""Trace contexts: which traces a request may be an example of."""

from __future__ import annotations

import pytest

from penstock.protocol.trace_context import exemplar_id, trace_id

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("", ""),
        (f"00-{TRACE}-{SPAN}-00", ""),
        (f"00-{TRACE}-{SPAN}-02", ""),
        (f"00-{TRACE}-{SPAN}-01", TRACE),
        (f"00-{TRACE}-{SPAN}-03", TRACE),
        (f"00-{TRACE}-{SPAN}-FF", TRACE),
        (f"cc-{TRACE}-{SPAN}-01-more", TRACE),
        (f"00-{TRACE.upper()}-{SPAN}-01", TRACE),
    ],
)
def test_only_a_sampled_trace_is_an_example_and_its_id_is_in_lower_case(
    given: str, found: str
) -> None:
    assert exemplar_id(given) == found
    assert not given or trace_id(given) == TRACE
