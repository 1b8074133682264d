"""Random patterns let the same strings through as Python's ``re``, put into ECMA-262's meaning."""

from __future__ import annotations

import json
import random
import re

import pytest
from support.conformance.schema_masks import compiled, takes

LINE_ENDS = "\\n\\r\\u2028\\u2029"
BLANKS = "\\t-\\r \\u00a0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000\\ufeff"
ATOMS = {
    **{one: one for one in 'ab/"é😀&~,= '},
    "-": r"\-",
    ".": f"[^{LINE_ENDS}]",
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": "[0-9A-Za-z_]",
    r"\W": "[^0-9A-Za-z_]",
    r"\s": f"[{BLANKS}]",
    r"\S": f"[^{BLANKS}]",
    r"\x41": "A",
    r"\u0042": "B",
    r"\u{1F600}": "😀",
    r"\ud83d\ude00": "😀",
    **{
        one: one
        for one in (r"\.", r"\n", r"\t", r"\\", r"\[", r"\]", r"\{", r"\}", r"[\]a]", "[ -~]")
    },
    "[[a]": r"[\[a]",
    "[a&&b]": "[a&b]",
    "[~~a]": "[~a]",
    "[a-]": r"[a\-]",
    "[^a-]": r"[^a\-]",
    r"[\w.-]": r"[0-9A-Za-z_.\-]",
    r"[^\d\s]": f"[^0-9{BLANKS}]",
    r"[^\D]": "[0-9]",
    "[^]": "(?s:.)",
    "[a^]": r"[a\^]",
}
"""ECMA-262's spelling of an atom, and one of Python's that means the same."""
REPEATS = ("", "", "", "*", "+", "?", "{2}", "{1,2}", "*?", "+?", "{1,2}?")
CHARACTERS = [*'aabbAB09_-/."é&~,= \n\t\\[]{}^+\r', "😀", "\u2028", "\u00a0", "\ufeff", "\u0085"]


def pattern(dice: random.Random, level: int = 0) -> tuple[str, str]:
    """A pattern, and the same for Python."""
    ours, theirs = [], []
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        one = other = ""
        if dice.random() < (0.5 if level == 0 else 0.05):
            one, other = "^", "^"
        for _ in range(dice.randrange(4)):
            atom, same = dice.choice(list(ATOMS.items()))
            if level < 3 and dice.random() < 0.2:
                inner, same = pattern(dice, level + 1)
                atom = f"{dice.choice(('(', '(?:'))}{inner})"
            repeat = dice.choice(REPEATS)
            one, other = one + atom + repeat, f"{other}(?:{same}){repeat}"
        if dice.random() < (0.5 if level == 0 else 0.05):
            one, other = one + "$", other + r"\Z"
        ours.append(one)
        theirs.append(f"(?:{other})")
    return "|".join(ours), "|".join(theirs)


def check(seeds: range) -> None:
    accepted = matched = 0
    for seed in seeds:
        dice = random.Random(f"pattern {seed}")
        ours, theirs = pattern(dice)
        matcher = compiled({"type": "string", "pattern": ours})
        if isinstance(matcher, str):
            continue
        accepted += 1
        for _ in range(20):
            text = "".join(dice.choice(CHARACTERS) for _ in range(dice.randrange(5)))
            matches = bool(re.search(theirs, text))
            matched += matches
            passes = takes(matcher, json.dumps(text, ensure_ascii=False))
            assert passes == matches, (seed, ours, text)
    assert accepted > 0.8 * len(seeds)
    assert 4 * accepted < matched < 16 * accepted


def test_random_patterns_mean_what_ecma_script_says() -> None:
    check(range(400))


@pytest.mark.slow
def test_many_random_patterns_mean_what_ecma_script_says() -> None:
    check(range(1000, 21_000))
