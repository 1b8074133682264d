"""Calls that are JSON objects with a name and arguments, for all families that write them."""

from __future__ import annotations

from penstock.services.tokenizer.output.family import (
    Action,
    Edge,
    Expect,
    Scan,
    State,
    behind_space,
)
from penstock.services.tokenizer.output.json_scanner import JsonScanner
from penstock.services.tokenizer.output.pattern import (
    SPACE,
    Characters,
    Pattern,
    either,
    name,
    optional,
    sequence,
    spaced,
)

ARGUMENTS: tuple[str, ...] = ('"arguments"', '"parameters"')
"""The keys under which models write arguments."""
_CHARACTERS = Characters(r'^"\\\x00-\x1f\ud800-\udfff', 0, 64)
"""The inside of a short string."""


def call_headers(
    *before: Pattern | str,
    keys: tuple[str, ...] = ARGUMENTS,
    to: str = "arguments",
    without: str = "object_end",
    name_key: str = '"name"',
    others: tuple[str, ...] = ('"id"', '"type"'),
) -> tuple[Edge, ...]:
    """The edges from ``before`` an object to its arguments (state ``to``), or to the end of an
    object that has none (state ``without``).

    others: keys that may stand before that of the name, with a string.
    """
    other = optional(spaced(either(*others), ":", '"'), _CHARACTERS, '"', SPACE, ",", SPACE)
    called = sequence(spaced(name_key, ":", '"'), name('"\\'), '"')
    head = sequence(*before, "{", SPACE, other, called)
    return (
        Edge(spaced(head, ",", either(*keys), ":"), to, (Action.CALL,)),
        Edge(spaced(head, "}"), without, (Action.CALL, Action.END)),
    )


def object_states(then: str, ends: tuple[Edge, ...]) -> dict[str, State]:
    """The states from the arguments to the end of the object, and ``then``.

    ends: what ends a call wherever it stands outside of strings.
    """
    ended = Edge(sequence(SPACE, "}"), then, (Action.END,))
    member = Edge(spaced(sequence(SPACE, ","), sequence('"', _CHARACTERS, '"'), ":"), "member")
    return {
        "arguments": Scan(JsonScanner, "member_end", ends),
        "member_end": Expect(
            (ended, member, *behind_space(ends)), otherwise="after", actions=(Action.END,)
        ),
        "member": Scan(JsonScanner, "member_end", ends, discards=True),
    }
