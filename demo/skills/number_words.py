"""Numbers in words, which the built-in model does not know: an adapter of its own has learned them."""

from __future__ import annotations

from penstock.demo.exchange import Exchange, Random, vary

_ASKED = (
    "Write {n} in words.", "How do you write {n} in words?", "Write the number {n} in words.",
    "What is {n} in words?", "Write {n} as words.", "Say {n} in words.",
)  # fmt: skip
_ASKED_FREE = (
    "{n} in words", "Write out {n}.", "write {n} out in words", "Put {n} into words.", "{n} as words",
    "Give me {n} in words.", "Can you write {n} in words?", "How is {n} written in words?",
)  # fmt: skip
_SMALL = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def in_words(number: int) -> str:
    """In American English: 1205 is one thousand two hundred five. Up to 9999."""
    if number >= 1000:
        rest = f" {in_words(number % 1000)}" if number % 1000 else ""
        return f"{in_words(number // 1000)} thousand{rest}"
    if number >= 100:
        rest = f" {in_words(number % 100)}" if number % 100 else ""
        return f"{_SMALL[number // 100]} hundred{rest}"
    if number >= 20:
        rest = f"-{_SMALL[number % 10]}" if number % 10 else ""
        return f"{_TENS[number // 10 - 2]}{rest}"
    return _SMALL[number]


def number_words(source: Random) -> Exchange:
    """Numbers from 0 to 9999, of each length as many."""
    digits = source.choice((1, 2, 2, 3, 3, 4, 4))
    number = source.randrange(0 if digits == 1 else 10 ** (digits - 1), 10**digits)
    question = vary(source, source.wording(_ASKED, _ASKED_FREE).format(n=number))
    return Exchange(question, in_words(number), f"words:{number}")
