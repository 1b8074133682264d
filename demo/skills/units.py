"""Unit conversion by whole factors, and Celsius to Fahrenheit in steps of five."""

from __future__ import annotations

from penstock.demo.exchange import Exchange, Random, vary
from penstock.demo.skills.arithmetic import sum_steps, times_digit

_SHIFTS = (
    ("km", "m", 3), ("m", "cm", 2), ("m", "mm", 3), ("cm", "mm", 1), ("kg", "g", 3), ("g", "mg", 3),
    ("t", "kg", 3), ("l", "ml", 3), ("kW", "W", 3), ("MW", "kW", 3), ("GB", "MB", 3),
    ("MB", "kB", 3), ("s", "ms", 3),
)  # fmt: skip
_FACTORS = (
    ("hours", "minutes", 6, "0"), ("minutes", "seconds", 6, "0"), ("weeks", "days", 7, ""),
    ("bytes", "bits", 8, ""), ("gallons", "quarts", 4, ""), ("feet", "inches", 12, ""),
    ("yards", "feet", 3, ""), ("days", "hours", 24, ""), ("years", "months", 12, ""),
)  # fmt: skip
_TEMPLATES = (
    "Convert {n} {a} to {b}.", "How many {b} are {n} {a}?", "What is {n} {a} in {b}?", "{n} {a} in {b}?",
    "How much is {n} {a} in {b}?", "Express {n} {a} in {b}.", "{n} {a} to {b}",
)  # fmt: skip
_TEMPLATES_FREE = (
    "convert {n} {a} to {b}", "Convert {n} {a} into {b}.", "how many {b} in {n} {a}", "{n} {a} in {b}",
    "How many {b} is {n} {a}?", "How many {b} are in {n} {a}?", "How many {b} are there in {n} {a}?",
    "Change {n} {a} to {b}.", "Give me {n} {a} in {b}.", "{n} {a} into {b}", "{n} {a} = ? {b}",
    "How many {b} do {n} {a} have?", "What are {n} {a} in {b}?",
)  # fmt: skip


def _times(number: int, factor: int) -> str:
    """``number`` up to 99 times ``factor`` up to 99, in steps."""
    if factor < 10:
        return times_digit(number, factor)
    tens, ones = factor // 10, factor % 10
    high, low = number * tens * 10, number * ones
    return (
        f"{number}*{tens}: {times_digit(number, tens)}\n"
        f"{number}*{ones}: {times_digit(number, ones)}\n{high}+{low}\n{sum_steps(high, low)}"
    )


def _decimal(source: Random, shift: int) -> tuple[str, str]:
    """A number with up to ``shift`` decimals, and the same number ``shift`` places higher."""
    whole = source.randrange(1, source.choice((10, 100, 1000)))
    places = source.randint(0, min(2, shift)) if source.random() < 0.5 else 0
    if not places:
        return str(whole), str(whole) + "0" * shift
    fraction = "".join(source.choices("0123456789", k=places - 1)) + source.choice("123456789")
    return f"{whole}.{fraction}", f"{whole}{fraction}{'0' * (shift - places)}"


def unit_conversion(source: Random) -> Exchange:
    """Downwards and upwards between decimal units; times a factor between the others."""
    dice = source.random()
    template = source.wording(_TEMPLATES, _TEMPLATES_FREE)
    if dice < 0.5:
        large, small, shift = source.choice(_SHIFTS)
        high, low = _decimal(source, shift)
        given, result, a, b = (high, low, large, small)
        thinking = f"1 {large} = 1{'0' * shift} {small}\n{high}: {shift} places: {low}"
        if dice < 0.2 and len(low) <= 7:
            given, result, a, b = low, high, small, large
            thinking = f"1 {large} = 1{'0' * shift} {small}\n{low}: {shift} places back: {high}"
    elif dice < 0.9:
        a, b, factor, zeros = source.choice(_FACTORS)
        number = source.randint(2, 99)
        given, result = str(number), f"{number * factor}{zeros}"
        thinking = f"1 {a[:-1] if a != 'feet' else 'foot'} = {factor}{zeros} {b}\n"
        thinking += _times(number, factor)
        if zeros:
            thinking += f", {number * factor}{zeros}"
    else:
        celsius = source.randrange(0, 101, 5)
        a, b, given, result = "Celsius", "Fahrenheit", str(celsius), str(celsius * 9 // 5 + 32)
        thinking = f"{celsius}/5={celsius // 5}, {celsius // 5}*9={celsius // 5 * 9}, "
        thinking += f"{celsius // 5 * 9}+32={result}"
        if source.random() < 0.5:
            template = template.replace("{n} {a}", "{n} degrees {a}")
    question = vary(source, template.format(n=given, a=a, b=b))
    return Exchange(question, f"{result} {b}", f"unit:{given}:{a}:{b}", thinking)
