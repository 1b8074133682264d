"""The answers in the training text are right: worked out here in another way."""

from __future__ import annotations

import datetime
import json
import re

import pytest

from penstock.demo.exchange import Exchange, Random, draw, plain
from penstock.demo.grading import is_right
from penstock.demo.mixture import SKILLS

COUNT = 300


def drawn(name: str, count: int = COUNT) -> list[Exchange]:
    """There are as many in the known wordings as in free ones."""
    found = []
    for free in (False, True):
        source = Random(f"test {name}")
        source.free = free
        found += [SKILLS[name][0](source) for _ in range(count)]
    return found


@pytest.mark.parametrize(
    ("name", "sign"), [("addition", "+"), ("subtraction", "-"), ("multiplication", "*")]
)
def test_demo_calculations_have_the_result_that_python_finds(name: str, sign: str) -> None:
    for exchange in drawn(name):
        a, b = (int(each) for each in re.findall(r"\d+", exchange.key))
        result = {"+": a + b, "-": a - b, "*": a * b}[sign]
        if "difference between" in exchange.question.lower():
            result = abs(result)
        assert exchange.answer == str(result)
        assert str(abs(result)) in exchange.thinking


def test_demo_every_equation_in_the_thinking_holds() -> None:
    for name in ("addition", "subtraction", "multiplication", "days_between", "units"):
        for exchange in drawn(name):
            for left, right in re.findall(
                r"(?<![\d*+-])(\d+(?:[-+*]\d+)+)=(-?\d+)", exchange.thinking
            ):
                numbers = [int(each) for each in re.findall(r"\d+", left)]
                result = numbers[0]
                for sign, number in zip(re.findall(r"[-+*]", left), numbers[1:], strict=True):
                    result = {"+": result + number, "-": result - number, "*": result * number}[
                        sign
                    ]
                assert result == int(right), exchange.thinking


def test_demo_quotients_times_divisors_plus_remainders_are_the_dividends() -> None:
    for exchange in drawn("division"):
        a, b = map(int, exchange.key.split("/"))
        found = [int(each) for each in re.findall(r"\d+", exchange.answer)]
        assert found[0] * b + (found[1] if len(found) > 1 else 0) == a


def test_demo_weekdays_are_those_of_the_calendar() -> None:
    for exchange in drawn("weekday", 2000):
        date = datetime.date.fromisoformat(exchange.key.partition(":")[2])
        name = date.strftime("%A")
        assert exchange.answer in (
            name,
            "Yes." if name == "Monday" else f"No, it is a {name}.",
        ), date


def test_demo_days_after_and_between_are_those_of_the_calendar() -> None:
    for exchange in drawn("days_after", 1000):
        _, start, days = exchange.key.split(":")
        date = datetime.date.fromisoformat(start) + datetime.timedelta(days=int(days))
        assert exchange.answer == date.isoformat()
    for exchange in drawn("days_between", 1000):
        _, a, b = exchange.key.split(":")
        days = datetime.date.fromisoformat(b) - datetime.date.fromisoformat(a)
        assert exchange.answer == str(days.days)


def test_demo_sorted_lists_are_sorted_and_complete() -> None:
    for exchange in drawn("sorting_numbers"):
        given = [int(each) for each in exchange.key.partition(":")[2].split(", ")]
        answer = [int(each) for each in exchange.answer.split(", ")]
        assert answer in (sorted(given), sorted(given, reverse=True))
    for exchange in drawn("sorting_words"):
        given_words = exchange.key.partition(":")[2].split(", ")
        assert exchange.answer.split(", ") == sorted(given_words)


def test_demo_letters_are_reversed_spelled_and_counted() -> None:
    for exchange in drawn("reversing"):
        assert plain(exchange.answer) == exchange.key.partition(":")[2][::-1]
    for exchange in drawn("spelling"):
        assert plain(exchange.answer).replace("-", "") == exchange.key.partition(":")[2]
    for exchange in drawn("counting_letters"):
        kind, *rest = exchange.key.split(":")
        count = len(rest[0]) if kind == "length" else rest[1].count(rest[0])
        assert exchange.answer == str(count)


def test_demo_extracted_values_stand_in_the_sentence() -> None:
    for exchange in drawn("extraction"):
        for value in json.loads(exchange.answer).values():
            assert value is None or str(value) in exchange.question


def test_demo_called_tools_are_offered_and_their_arguments_have_the_right_types() -> None:
    kinds = {"string": str, "integer": int}
    for exchange in drawn("tool_call"):
        call = json.loads(exchange.answer.split("\n")[1])
        offered = {tool["function"]["name"]: tool["function"] for tool in exchange.tools}
        schema = offered[call["name"]]["parameters"]
        assert list(call["arguments"]) == schema["required"]
        for name, value in call["arguments"].items():
            assert isinstance(value, kinds[schema["properties"][name]["type"]])
            assert str(value) in exchange.question


def test_demo_a_request_without_a_fitting_tool_names_a_tool_that_is_not_offered() -> None:
    for exchange in drawn("no_tool", 100):
        assert exchange.tools
        assert "<tool_call>" not in exchange.answer


def test_demo_what_is_recalled_was_said_before() -> None:
    for exchange in drawn("recall"):
        if exchange.answer.startswith("You have not told"):
            continue
        value = re.split(r" (?:is|in|as a|have a) ", exchange.answer)[-1].rstrip(".").lower()
        assert any(value in earlier.question.lower() for earlier in exchange.before)


def test_demo_free_wordings_keep_what_the_question_is_about() -> None:
    """The numbers, words and dates of the key stand in the question, whatever is around them."""
    for exchange in drawn("addition"):
        assert all(re.search(rf"(?<!\d){n}(?!\d)", exchange.question) for n in
                   exchange.key.split("+"))  # fmt: skip
    for name in ("reversing", "spelling", "counting_letters"):
        for exchange in drawn(name):
            assert exchange.key.rpartition(":")[2] in exchange.question
    for name in ("sorting_numbers", "sorting_words", "extremes", "counting_items"):
        for exchange in drawn(name):
            items = exchange.key.partition(":")[2].split(", ")
            places = [exchange.question.find(item) for item in items]
            assert -1 not in places, exchange


def test_demo_free_wordings_are_many_and_leave_the_known_ones_as_they_are() -> None:
    known: set[str] = set()
    free: set[str] = set()
    for name in SKILLS:
        exchanges = drawn(name, 100)
        known |= {exchange.question for exchange in exchanges[:100]}
        free |= {exchange.question for exchange in exchanges[100:]}
    assert any(question.startswith("whats ") for question in free)
    assert not any(question.startswith("whats ") for question in known)
    small = sum(question.islower() for question in free)
    assert small > 3 * sum(question.islower() for question in known)
    assert small < 2 * len(free) / 3, "capitals have to stay known too"


def test_demo_no_question_has_two_answers() -> None:
    """Whichever skill asks it; what depends on tools or on what was said before is left out."""
    answers: dict[str, str] = {}
    for name in set(SKILLS) - {"recall", "tool_call", "tool_result", "no_tool", "story"}:
        for exchange in drawn(name):
            assert answers.setdefault(exchange.question, exchange.answer) == exchange.answer


@pytest.mark.parametrize("name", SKILLS)
def test_demo_the_expected_answer_is_graded_right_and_another_one_wrong(name: str) -> None:
    source = Random(name)
    for _ in range(20):
        exchange = draw(SKILLS[name][0], source, held_out=True)
        said = f"<think>\n{exchange.thinking}\n</think>\n\n{plain(exchange.answer)}"
        assert is_right(said, exchange)
        assert is_right(plain(exchange.answer), exchange)
        assert not is_right("", exchange)
        assert not is_right(plain(exchange.answer)[:-2], exchange)


def test_demo_a_tool_call_is_compared_by_meaning_and_nothing_may_stand_around_it() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1, "b": "x"}}\n</tool_call>'
    exchange = Exchange("q", call, "k", check="tool")
    assert is_right('<tool_call>{"arguments":{"b":"x","a":1},"name":"f"}</tool_call>', exchange)
    assert not is_right(f"Sure! {call}", exchange)
    assert not is_right(call.replace("1", '"1"'), exchange)
    assert not is_right(call.replace("</tool_call>", ""), exchange)
