"""Sorting numbers and words and counting things: up to eight of them."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.demo.exchange import Exchange, Random, vary
from penstock.demo.words import THINGS, WORDS, any_word

_SORT_NUMBERS = (
    "Sort these numbers: {l}", "Sort {l}.", "Sort the numbers {l} in ascending order.",
    "Put these numbers in order: {l}", "Order these numbers from smallest to largest: {l}",
    "Can you sort {l}?", "Sort in ascending order: {l}",
)  # fmt: skip
_SORT_NUMBERS_FREE = (
    "{l} sorted", "Sort this: {l}", "Sort this list: {l}", "sort the numbers {l}", "Order {l}.",
    "Put {l} in order.", "Arrange {l} in ascending order.", "Bring these numbers in order: {l}", "sort: {l}",
    "What is {l} in order?", "Sort {l} from small to large.", "sort {l}", "sort {l} ascending", "Can you order {l}?",
)  # fmt: skip
_SORT_DOWN = (
    "Sort these numbers in descending order: {l}", "Sort from largest to smallest: {l}",
    "Order the numbers {l} from largest to smallest.", "Sort in descending order: {l}",
)  # fmt: skip
_SORT_DOWN_FREE = (
    "sort {l} descending", "Sort {l} in descending order.", "Sort {l} from large to small.",
    "Put {l} in descending order.", "Order {l} from highest to lowest.", "sort {l}, largest first",
)  # fmt: skip
_SORT_WORDS = (
    "Sort these words: {l}", "Sort these words alphabetically: {l}", "Sort alphabetically: {l}",
    "Put these words in alphabetical order: {l}", "Sort the words {l} in alphabetical order.",
)  # fmt: skip
_SORT_WORDS_FREE = (
    "Sort {l}.", "Sort {l} alphabetically.", "Put {l} in alphabetical order.", "sort this list: {l}",
    "Order {l} alphabetically.", "Alphabetize {l}.", "Sort by the alphabet: {l}", "sort: {l}", "Sort this: {l}",
    "Sort the words {l}.", "Can you sort {l}?", "Can you put {l} in alphabetical order?", "{l} sorted alphabetically",
)  # fmt: skip
_COUNT = (
    "How many items are in this list: {l}?", "Count the items: {l}", "How many things are these: {l}?",
    "How many words are in this list: {l}?", "Count these: {l}", "How many are there: {l}?",
)  # fmt: skip
_COUNT_FREE = (
    "Count {l}.", "How many items: {l}?", "How many are these: {l}?", "How long is this list: {l}?",
    "How many words are there in {l}?", "Count the words: {l}", "Count the things in this list: {l}",
)  # fmt: skip
_LARGEST = (
    "What is the largest of {l}?", "Which number is the largest: {l}?", "Find the maximum of {l}.",
)  # fmt: skip
_LARGEST_FREE = (
    "What is the biggest of {l}?", "Which is the biggest: {l}?", "What is the largest number in {l}?",
    "max of {l}", "What is the maximum of {l}?", "Which of {l} is the largest?", "the highest of {l}?",
    "biggest of {l}", "largest of {l}", "Which number is bigger: {l}?", "What is the greatest of {l}?", "What is the highest number: {l}?",
)  # fmt: skip
_SMALLEST = (
    "What is the smallest of {l}?", "Which number is the smallest: {l}?", "Find the minimum of {l}.",
)  # fmt: skip
_SMALLEST_FREE = (
    "Which is the smallest: {l}?", "What is the smallest number in {l}?", "min of {l}",
    "What is the minimum of {l}?", "Which of {l} is the smallest?", "the lowest of {l}?",
    "smallest of {l}", "Which number is smaller: {l}?", "What is the lowest number: {l}?", "What is the least of {l}?",
)  # fmt: skip
_JOINED = (", ", " ", ",", " and ", "; ")


def _listed(source: Random, items: Sequence[str]) -> str:
    """The items with commas between; freely worded also with other signs, or with "and"."""
    if not source.free or source.random() < 0.4:
        return ", ".join(items)
    if source.random() < 0.4:
        return f"{', '.join(items[:-1])} and {items[-1]}"
    return source.choice(_JOINED).join(items)


def _numbers(source: Random) -> list[int]:
    most = source.choice((20, 100, 100, 1000))
    return source.sample(range(most), source.randint(2 if source.free else 3, 8))


def _by_length(numbers: list[int], *, down: bool) -> str:
    lines = []
    for size in sorted({len(str(number)) for number in numbers}, reverse=down):
        group = [number for number in numbers if len(str(number)) == size]
        ordered = sorted(group, reverse=down)
        lines.append(f"{size} long: {', '.join(map(str, group))} -> {', '.join(map(str, ordered))}")
    return "\n".join(lines)


def sorting_numbers(source: Random) -> Exchange:
    """Different numbers below 1000, upwards or downwards; shorter ones are smaller."""
    numbers = _numbers(source)
    down = source.random() < 0.25
    known, more = (_SORT_DOWN, _SORT_DOWN_FREE) if down else (_SORT_NUMBERS, _SORT_NUMBERS_FREE)
    text = ", ".join(map(str, numbers))
    listed = _listed(source, [*map(str, numbers)])
    question = vary(source, source.wording(known, more).format(l=listed))
    answer = ", ".join(map(str, sorted(numbers, reverse=down)))
    return Exchange(question, answer, f"sort:{text}", _by_length(numbers, down=down))


def sorting_words(source: Random) -> Exchange:
    """Words that differ in their first two letters, which are written down first."""
    wanted, words = source.randint(3, 8), dict[str, str]()
    while len(words) < wanted:
        word = any_word(source) if source.free and source.random() < 0.4 else source.choice(WORDS)
        words.setdefault(word[:2], word)
    listed = list(words.values())
    source.shuffle(listed)
    text = ", ".join(listed)
    question = vary(
        source, source.wording(_SORT_WORDS, _SORT_WORDS_FREE).format(l=_listed(source, listed))
    )
    ordered = sorted(listed)
    starts = ", ".join(f"{word[0]} {word[1]} {word}" for word in listed)
    order = ", ".join(f"{word[0]} {word[1]} {word}" for word in ordered)
    return Exchange(question, ", ".join(ordered), f"sort:{text}", f"{starts}\n{order}")


def counting_items(source: Random) -> Exchange:
    """Two to ten things, numbered one by one."""
    items = source.sample(THINGS, source.randint(2, 10))
    text = ", ".join(items)
    question = vary(source, source.wording(_COUNT, _COUNT_FREE).format(l=_listed(source, items)))
    thinking = " ".join(f"{number} {item}" for number, item in enumerate(items, 1))
    return Exchange(question, str(len(items)), f"items:{text}", thinking)


def extremes(source: Random) -> Exchange:
    """The largest or smallest of some numbers."""
    numbers = _numbers(source)
    text = ", ".join(map(str, numbers))
    largest = source.random() < 0.5
    known, more = (_LARGEST, _LARGEST_FREE) if largest else (_SMALLEST, _SMALLEST_FREE)
    listed = _listed(source, [*map(str, numbers)])
    question = vary(source, source.wording(known, more).format(l=listed))
    answer = max(numbers) if largest else min(numbers)
    key = f"{'max' if largest else 'min'}:{text}"
    return Exchange(question, str(answer), key, _by_length(numbers, down=largest))
