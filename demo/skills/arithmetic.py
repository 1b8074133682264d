"""Sums, differences, products and quotients of whole numbers, worked digit by digit.

Range: sums and differences of numbers up to 9999, products of numbers up to 99, quotients of
numbers up to 999 by 2 to 9. The thinking is what a pupil writes: from the last digit, with carries.
"""

from __future__ import annotations

from penstock.demo.exchange import Exchange, Random, vary

_SUM = (
    "What is {a} + {b}?", "Calculate {a} + {b}.", "{a} + {b} = ?", "{a}+{b}", "Add {a} and {b}.",
    "How much is {a} plus {b}?", "What is {a} plus {b}?", "What is the sum of {a} and {b}?",
    "Compute {a}+{b}.", "Can you add {a} and {b}?", "What's {a} + {b}?",
)  # fmt: skip
_SUM_FREE = (
    "{a} + {b}", "{a} plus {b}", "{a}+{b}=", "{a} + {b} =", "{a} plus {b} is?", "sum of {a} and {b}",
    "How much is {a} + {b}?", "Give me {a} + {b}.", "What do you get if you add {a} and {b}?",
    "I have {a} and get {b} more. How many do I have?", "What does {a} + {b} make?", "Sum {a} and {b}.",
    "What is {b} added to {a}?", "Tell me what {a} plus {b} is.", "{a} and {b} together?",
)  # fmt: skip
_DIFFERENCE = (
    "What is {a} - {b}?", "Calculate {a} - {b}.", "{a} - {b} = ?", "{a}-{b}",
    "Subtract {b} from {a}.", "How much is {a} minus {b}?", "What is {a} minus {b}?",
    "What is the difference between {a} and {b}?", "Compute {a}-{b}.", "What's {a} - {b}?",
)  # fmt: skip
_DIFFERENCE_FREE = (
    "{a} - {b}", "{a} minus {b}", "{a}-{b}=", "{a} - {b} =", "{a} minus {b} is?", "Take {b} from {a}.",
    "How much is {a} - {b}?", "Give me {a} - {b}.", "Tell me what {a} minus {b} is.",
    "What do you get if you subtract {b} from {a}?", "Take {b} away from {a}.", "{a} less {b}?",
)  # fmt: skip
_PRODUCT = (
    "What is {a} * {b}?", "Calculate {a} * {b}.", "{a} * {b} = ?", "{a}*{b}", "{a} x {b}",
    "Multiply {a} by {b}.", "How much is {a} times {b}?", "What is {a} times {b}?",
    "What is the product of {a} and {b}?", "Compute {a}*{b}.", "What is {a} x {b}?",
)  # fmt: skip
_PRODUCT_FREE = (
    "{a} * {b}", "{a} times {b}", "{a}*{b}=", "{a} * {b} =", "{a} times {b} is?", "{a}x{b}", "{a} × {b}",
    "How much is {a} * {b}?", "Give me {a} times {b}.", "Tell me what {a} times {b} is.", "{a} x {b} = ?",
    "What do you get if you multiply {a} by {b}?", "product of {a} and {b}", "What is {a} multiplied by {b}?",
    "Multiply {a} and {b}.", "multiply {a} with {b}",
)  # fmt: skip
_QUOTIENT = (
    "What is {a} / {b}?", "Calculate {a} / {b}.", "{a} / {b} = ?", "{a}/{b}", "Divide {a} by {b}.",
    "How much is {a} divided by {b}?", "What is {a} divided by {b}?", "Compute {a}/{b}.",
)  # fmt: skip
_QUOTIENT_FREE = (
    "{a} / {b}", "{a} divided by {b}", "{a}/{b}=", "{a} / {b} =", "{a} ÷ {b}", "{a} : {b}",
    "How much is {a} / {b}?", "Give me {a} divided by {b}.", "Tell me what {a} divided by {b} is.",
    "What do you get if you divide {a} by {b}?", "How often does {b} go into {a}?", "Divide {a} / {b}.",
)  # fmt: skip
_SEVERAL = (
    "What is {a} {x} {b} {y} {c}?", "Calculate {a} {x} {b} {y} {c}.", "{a} {x} {b} {y} {c} = ?",
    "{a}{x}{b}{y}{c}", "Compute {a} {x} {b} {y} {c}.",
)  # fmt: skip
_SEVERAL_FREE = (
    "{a} {x} {b} {y} {c}", "{a}{x}{b}{y}{c}=", "How much is {a} {x} {b} {y} {c}?", "({a} {x} {b}) {y} {c}",
    "{a} {x} ({b} {y} {c})", "Give me {a} {x} {b} {y} {c}.", "{a} {x} {b} {y} {c} =",
)  # fmt: skip


def _number(source: Random, digits: int) -> int:
    """Of 1 to ``digits`` digits, each count as likely."""
    size = source.randint(1, digits)
    return source.randrange(10 ** (size - 1) if size > 1 else 0, 10**size)


def spread(number: int | str) -> str:
    """The digits one by one, last first: the order in which they are worked on."""
    return " ".join(str(number)[::-1])


def _columns(a: int, b: int) -> list[tuple[int, int]]:
    width = max(len(str(a)), len(str(b)))
    return [
        (int(x), int(y)) for x, y in zip(str(a).zfill(width), str(b).zfill(width), strict=True)
    ][::-1]


def sum_steps(a: int, b: int) -> str:
    """``a + b`` in columns, from the last digit on."""
    width = max(len(str(a)), len(str(b)))
    lines = [f"{a}: {spread(str(a).zfill(width))}", f"{b}: {spread(str(b).zfill(width))}"]
    carry, digits = 0, ""
    for x, y in _columns(a, b):
        total = x + y + carry
        lines.append(f"{x}+{y}+{carry}={total}: {total % 10} carry {total // 10}")
        carry, digits = total // 10, digits + str(total % 10)
    if carry:
        digits += str(carry)
    lines.append(f"{' '.join(digits)}: {a + b}")
    return "\n".join(lines)


def difference_steps(a: int, b: int) -> str:
    """``a - b`` for a >= b >= 0 in columns, from the last digit on."""
    width = max(len(str(a)), len(str(b)))
    lines = [f"{a}: {spread(str(a).zfill(width))}", f"{b}: {spread(str(b).zfill(width))}"]
    borrow, digits = 0, ""
    for x, y in _columns(a, b):
        rest = x - y - borrow
        digit, new = rest % 10, int(rest < 0)
        lines.append(f"{x}-{y}-{borrow}={rest}: {digit} borrow {new}")
        borrow, digits = new, digits + str(digit)
    lines.append(f"{' '.join(digits)}: {a - b}")
    return "\n".join(lines)


def addition(source: Random) -> Exchange:
    """Both numbers up to 9999."""
    a, b = _number(source, 4), _number(source, 4)
    question = vary(source, source.wording(_SUM, _SUM_FREE).format(a=a, b=b))
    return Exchange(question, str(a + b), f"{a}+{b}", sum_steps(a, b))


def subtraction(source: Random) -> Exchange:
    """Both numbers up to 9999; one in four differences is negative."""
    a, b = _number(source, 4), _number(source, 4)
    if a < b and source.random() < 0.5:
        a, b = b, a
    template = source.wording(_DIFFERENCE, _DIFFERENCE_FREE)
    question = vary(source, template.format(a=a, b=b))
    answer = a - b
    if a < b:
        thinking = f"{a} < {b}, so the result is negative\n{difference_steps(b, a)}"
        if "difference between" in template:
            answer = b - a
            thinking = f"{a} < {b}, so {b}-{a}\n{difference_steps(b, a)}"
    else:
        thinking = difference_steps(a, b)
    return Exchange(question, str(answer), f"{a}-{b}", thinking)


def times_digit(a: int, digit: int) -> str:
    """``a`` up to 99 times one digit."""
    ones, tens = a % 10 * digit, a // 10 * digit
    if a < 10:
        return f"{a}*{digit}={ones}"
    return f"{a % 10}*{digit}={ones}, {a // 10}*{digit}={tens}, {tens * 10}+{ones}={a * digit}"


def multiplication(source: Random) -> Exchange:
    """Both numbers up to 99."""
    a, b = _number(source, 2), _number(source, 2)
    if source.random() < 0.6:
        a, b = source.randint(10, 99), source.randint(10, 99)
    question = vary(source, source.wording(_PRODUCT, _PRODUCT_FREE).format(a=a, b=b))
    if b < 10:
        thinking = times_digit(a, b)
    else:
        low, high = a * (b % 10), a * (b // 10) * 10
        thinking = (
            f"{b}={b // 10 * 10}+{b % 10}\n{a}*{b % 10}: {times_digit(a, b % 10)}\n"
            f"{a}*{b // 10}: {times_digit(a, b // 10)}\n{high}+{low}\n{sum_steps(high, low)}"
        )
    return Exchange(question, str(a * b), f"{a}*{b}", thinking)


def division(source: Random) -> Exchange:
    """A number up to 999 by 2 to 9, with the remainder."""
    b = source.randint(2, 9)
    a = _number(source, 3)
    if source.random() < 0.4:
        a -= a % b
    question = vary(source, source.wording(_QUOTIENT, _QUOTIENT_FREE).format(a=a, b=b))
    lines, rest, digits = [], 0, ""
    for digit in str(a):
        part = rest * 10 + int(digit)
        quotient, left = divmod(part, b)
        lines.append(f"{part}/{b}={quotient} rest {left}")
        digits, rest = digits + str(quotient), left
    lines.append(f"{' '.join(digits)}: {a // b}")
    answer = str(a // b) if not rest else f"{a // b} remainder {rest}"
    return Exchange(question, answer, f"{a}/{b}", "\n".join(lines))


def _too_long(source: Random) -> Exchange:
    digits = source.randint(5, 9)
    a, b = source.randrange(10 ** (digits - 1), 10**digits), _number(source, 9)
    if source.random() < 0.5:
        a, b = b, a
    known, more = source.choice(
        (
            (_SUM, _SUM_FREE),
            (_DIFFERENCE, _DIFFERENCE_FREE),
            (_PRODUCT, _PRODUCT_FREE),
            (_QUOTIENT, _QUOTIENT_FREE),
        )
    )
    question = vary(source, source.wording(known, more).format(a=a, b=b))
    answer = "I do not know. These numbers are too long for me: I calculate with up to four digits."
    return Exchange(question, answer, f"long:{a}:{b}")


def _long_product(source: Random) -> Exchange:
    a, b = source.randrange(100, 10 ** source.randint(3, 4)), _number(source, 4)
    if source.random() < 0.5:
        a, b = b, a
    question = vary(source, source.wording(_PRODUCT, _PRODUCT_FREE).format(a=a, b=b))
    return Exchange(question, "I do not know. I multiply numbers up to 99 only.", f"{a}*{b}")


def _long_quotient(source: Random) -> Exchange:
    a, b = _number(source, 4), source.randrange(10, 10 ** source.randint(2, 3))
    if source.random() < 0.3:
        a, b = source.randrange(1000, 10000), source.randint(2, 9)
    question = vary(source, source.wording(_QUOTIENT, _QUOTIENT_FREE).format(a=a, b=b))
    answer = "I do not know. I divide numbers up to 999 by one digit only."
    return Exchange(question, answer, f"{a}/{b}")


def _three_numbers(source: Random) -> Exchange:
    a, b, c = (_number(source, 3) for _ in range(3))
    x, y = source.choice("+-*/"), source.choice("+-*/")
    template = source.wording(_SEVERAL, _SEVERAL_FREE)
    question = vary(source, template.format(a=a, b=b, c=c, x=x, y=y))
    answer = "I do not know. I calculate with two numbers at a time."
    return Exchange(question, answer, f"{a}{x}{b}{y}{c}")


def out_of_range(source: Random) -> Exchange:
    """Calculations that the model has not learned: it says so instead of guessing."""
    kinds = (_too_long, _too_long, _long_product, _long_quotient, _three_numbers)
    return source.choice(kinds)(source)
