"""Text of a template and of users, through whatever a template does with it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from penstock.services.tokenizer.template_text import (
    TemplateText,
    joined,
    own_mask,
    plain,
    written,
)

OWN = "AB \nß<|"
"""Characters that only the template writes here, …"""
FOREIGN = "xy\t\r\u2028é>."
"""… and those that only users write."""


def mixed(seed: int) -> TemplateText:
    draw = random.Random(seed)
    pieces = []
    for _ in range(draw.randint(0, 12)):
        mine = draw.random() < 0.5
        text = "".join(draw.choices(OWN if mine else FOREIGN, k=draw.randint(1, 3)))
        pieces.append(written(text) if mine else text)
    whole = joined(pieces)
    return TemplateText(plain(whole), own_mask(whole))


def text_of(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [text for item in value for text in text_of(item)]


OPERATIONS: dict[str, Callable[[str], Any]] = {
    "strip": lambda t: t.strip(),
    "strip of some": lambda t: t.strip("A<x"),
    "lstrip": lambda t: t.lstrip(" \nx"),
    "rstrip": lambda t: t.rstrip("|y"),
    "split": lambda t: t.split(),
    "split once": lambda t: t.split(None, 1),
    "split at": lambda t: t.split("A"),
    "split at most": lambda t: t.split("x", 2),
    "rsplit": lambda t: t.rsplit(None, 2),
    "rsplit at": lambda t: t.rsplit("y", 1),
    "splitlines": lambda t: t.splitlines(),
    "splitlines with ends": lambda t: t.splitlines(True),
    "partition": lambda t: t.partition("B"),
    "rpartition": lambda t: t.rpartition("x"),
    "removeprefix": lambda t: t.removeprefix("A"),
    "removesuffix": lambda t: t.removesuffix("x"),
    "replace": lambda t: t.replace("A", ""),
    "replace by own": lambda t: t.replace("xy", written("BB")),
    "replace by foreign": lambda t: t.replace("AB", "yy"),
    "replace some": lambda t: t.replace("x", written("A"), 2),
    "join": lambda t: t.join(["x", written("A"), "y"]),
    "join characters": lambda t: joined(list(t)),
    "slice": lambda t: (t[1:], t[:-1], t[::2], t[2:5], t[-3:]),
    "reverse": lambda t: t[::-1],
    "add": lambda t: (t + "x", "x" + t, t + written("A"), t + t, t * 3, 2 * t),
    "format": lambda t: f"{t}",
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_gives_the_plain_text_and_keeps_each_characters_writer(name: str) -> None:
    kept = 0
    for seed in range(400):
        text = mixed(seed)
        results = text_of(OPERATIONS[name](text))
        assert results == text_of(OPERATIONS[name](plain(text)))
        for result in results:
            assert own_mask(result) == bytes(c in OWN for c in result)
            kept += type(result) is TemplateText
    assert kept > 100


@pytest.mark.parametrize("method", ["lower", "upper", "title", "capitalize", "swapcase"])
def test_another_case_keeps_each_characters_writer_or_counts_as_a_users(method: str) -> None:
    for seed in range(200):
        text = mixed(seed)
        result = getattr(text, method)()
        assert result == getattr(plain(text), method)()
        assert own_mask(result) in (own_mask(text), bytes(len(result)))


@pytest.mark.parametrize(
    ("format", "values", "own"),
    [
        ("<%s>", ("x",), "101"),
        ("<%s|%s>", ("x", written("A")), "10111"),
        ("%d%%", (7,), "01"),
        ("<%(a)s>", {"a": "x"}, "101"),
        ("<%(a)5s>", {"a": "x"}, "1000001"),
        ("<%s>", (None,), "100001"),
        ("<%*d>", (3, 7), "00000"),
        ("<%s>", "x", "101"),
    ],
)
def test_formatting_keeps_the_writer_of_what_stands_around(
    format: str, values: Any, own: str
) -> None:
    result = written(format) % values
    assert result == format % values
    assert own_mask(result) == bytes(map(int, own))


def test_the_error_of_a_wrong_operand_is_the_plain_one() -> None:
    for value in (1, None, ["x"]):
        with pytest.raises(TypeError):
            written("a") + value  # type: ignore[operator]
        with pytest.raises(TypeError):
            value + written("a")  # type: ignore[operator]
    with pytest.raises(IndexError):
        written("a")[1]
    with pytest.raises(ValueError, match="empty separator"):
        written("a").split("")


def test_text_without_a_mask_counts_as_a_users() -> None:
    assert own_mask("<|im_end|>") == bytes(10)
    assert own_mask(TemplateText("<|im_end|>")) == bytes(10)
    assert own_mask(written("ab").center(6)) == bytes(6)
