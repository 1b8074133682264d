"""Weekdays of dates from 2000 to 2099, and days between dates and after them."""

from __future__ import annotations

import datetime

from penstock.demo.exchange import Exchange, Random, vary
from penstock.demo.skills.arithmetic import difference_steps
from penstock.demo.words import MONTHS, WEEKDAYS

_FIRST = datetime.date(2000, 1, 1)
_DAYS = (datetime.date(2100, 1, 1) - _FIRST).days
_MONTH_CODES = (6, 2, 2, 5, 0, 3, 5, 1, 4, 6, 2, 4)
"""Weekday numbers (Monday 1) add up to: year, a quarter of it, this code, the day."""
_WEEKDAY = (
    "What weekday is {d}?", "What day of the week is {d}?", "Which weekday is {d}?",
    "What weekday was {d}?", "On which day of the week does {d} fall?", "Is {d} a Monday?",
)  # fmt: skip
_WEEKDAY_FREE = (
    "What day is {d}?", "What day was {d}?", "Which day is {d}?", "weekday of {d}", "{d}, which weekday?",
    "What day of the week was {d}?", "What weekday does {d} fall on?", "day of the week for {d}",
    "On what day is {d}?", "{d} is what day?", "What day will {d} be?", "Tell me the weekday of {d}.",
)  # fmt: skip
_AFTER = (
    "What is the date {n} days after {d}?", "What date is {n} days after {d}?",
    "Which date comes {n} days after {d}?", "Add {n} days to {d}.", "{d} plus {n} days?",
)  # fmt: skip
_AFTER_FREE = (
    "{n} days after {d}", "{d} + {n} days", "What is {d} plus {n} days?", "When is {n} days after {d}?",
    "What day is {n} days after {d}?", "date {n} days after {d}", "Which date is {n} days after {d}?",
)  # fmt: skip
_BETWEEN = (
    "How many days are between {a} and {b}?", "How many days is it from {a} to {b}?",
    "How many days are there from {a} to {b}?", "Count the days between {a} and {b}.",
)  # fmt: skip
_BETWEEN_FREE = (
    "days between {a} and {b}", "How many days between {a} and {b}?", "days from {a} to {b}",
    "How many days from {a} to {b}?", "How many days are there between {a} and {b}?",
    "How many days lie between {a} and {b}?", "How many days until {b} from {a}?", "number of days from {a} to {b}",
)  # fmt: skip
_SHIFT = (
    "What day is {n} days after {w}?", "Which weekday is {n} days after {w}?",
    "Today is {w}. What day is it in {n} days?", "If today is {w}, what day is it in {n} days?",
    "It is {w}. Which weekday is it in {n} days?",
)  # fmt: skip
_SHIFT_FREE = (
    "{n} days after {w}", "{w} plus {n} days", "It's {w}, what day is it in {n} days?",
    "What day comes {n} days after {w}?", "Today is {w}, which day is it in {n} days?",
)  # fmt: skip


def _is_leap(year: int) -> bool:
    """From 2000 to 2099 every fourth year is one."""
    return year % 4 == 0


def _days_in(year: int, month: int) -> int:
    return (
        29
        if month == 2 and _is_leap(year)
        else (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)[month - 1]
    )


def _written(source: Random, date: datetime.date) -> str:
    dice = source.random()
    if dice < 0.5:
        return date.isoformat()
    month = MONTHS[date.month - 1]
    if dice < 0.75:
        return f"{date.day} {month} {date.year}"
    return f"{month} {date.day}, {date.year}"


def _date(source: Random) -> datetime.date:
    return _FIRST + datetime.timedelta(days=source.randrange(_DAYS))


def weekday(source: Random) -> Exchange:
    """Year, quarter of the year, month code and day, added up and reduced by sevens."""
    date = _date(source)
    template = source.wording(_WEEKDAY, _WEEKDAY_FREE)
    question = vary(source, template.format(d=_written(source, date)))
    year, month, day = date.year % 100, date.month, date.day
    lines = [
        f"year {year}, month {month}, day {day}",
        f"{year}/4={year // 4}, {year}+{year // 4}={year + year // 4}, "
        f"mod 7={(year + year // 4) % 7}",
    ]
    code = _MONTH_CODES[month - 1]
    if month <= 2 and _is_leap(year):
        code -= 1
        lines.append(f"{MONTHS[month - 1]}, leap year: {code}")
    else:
        lines.append(f"{MONTHS[month - 1]}: {code}")
    lines.append(f"day {day} mod 7={day % 7}")
    parts = (year + year // 4) % 7, code, day % 7
    total = sum(parts)
    lines.append(f"{parts[0]}+{parts[1]}+{parts[2]}={total}, mod 7={total % 7}")
    name = WEEKDAYS[(total - 1) % 7]
    if "Monday" in template:
        name = "Yes." if name == "Monday" else f"No, it is a {name}."
        lines.append(WEEKDAYS[(total - 1) % 7])
    return Exchange(question, name, f"weekday:{date}", "\n".join(lines))


def days_after(source: Random) -> Exchange:
    """1 to 60 days after a date, month by month; the answer is an ISO date."""
    date, days = _date(source), source.randint(1, 60)
    question = vary(
        source, source.wording(_AFTER, _AFTER_FREE).format(d=_written(source, date), n=days)
    )
    lines = [f"{date.isoformat()}: {date.day}+{days}={date.day + days}"]
    year, month, left = date.year, date.month, date.day + days
    while left > _days_in(year, month):
        size = _days_in(year, month)
        line = f"{MONTHS[month - 1]} {year} has {size}: {left}-{size}={left - size}"
        left -= size
        year, month = (year, month + 1) if month < 12 else (year + 1, 1)
        lines.append(line)
    lines.append(f"{MONTHS[month - 1]} {year} has {_days_in(year, month)}")
    answer = (date + datetime.timedelta(days=days)).isoformat()
    return Exchange(question, answer, f"after:{date}:{days}", "\n".join(lines))


def days_between(source: Random) -> Exchange:
    """Two dates of one year: the difference of their numbers in the year."""
    first = _date(source)
    second = datetime.date(first.year, 1, 1) + datetime.timedelta(days=source.randrange(365))
    if source.random() < 0.3:
        second = first + datetime.timedelta(days=source.randint(1, 40))
        if second.year != first.year:
            return days_between(source)
    if first == second:
        return days_between(source)
    a, b = sorted((first, second))
    template = source.wording(_BETWEEN, _BETWEEN_FREE)
    question = vary(source, template.format(a=_written(source, a), b=_written(source, b)))
    lines = [f"{a.year % 100}/4={a.year % 100 // 4} rest {a.year % 4}"]
    lines[0] += ", leap year" if _is_leap(a.year) else ", no leap year"
    numbers = []
    for date in (a, b):
        before = sum(_days_in(date.year, month) for month in range(1, date.month))
        lines.append(
            f"{MONTHS[date.month - 1]} {date.day}: {before}+{date.day}={before + date.day}"
        )
        numbers.append(before + date.day)
    lines.append(f"{numbers[1]}-{numbers[0]}\n{difference_steps(numbers[1], numbers[0])}")
    answer = str(numbers[1] - numbers[0])
    return Exchange(question, answer, f"between:{a}:{b}", "\n".join(lines))


def weekday_shift(source: Random) -> Exchange:
    """1 to 100 days after a weekday."""
    start, days = source.randrange(7), source.randint(1, 100)
    question = vary(source, source.wording(_SHIFT, _SHIFT_FREE).format(w=WEEKDAYS[start], n=days))
    name = WEEKDAYS[(start + days) % 7]
    lines = [
        f"{days}={days // 7 * 7}+{days % 7}",
        " ".join(f"{step} {WEEKDAYS[(start + step) % 7]}" for step in range(days % 7 + 1)),
    ]
    return Exchange(question, name, f"shift:{start}:{days}", "\n".join(lines))
