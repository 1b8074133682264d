"""Spelling and reversing words and counting their letters: up to ten letters."""

from __future__ import annotations

from penstock.demo.exchange import Exchange, Random, letters, vary
from penstock.demo.words import any_word

_SPELL = (
    "Spell {w}.", "Spell the word {w}.", "How do you spell {w}?", "Can you spell {w}?",
    "Spell the word '{w}'.", 'Spell "{w}".', "Write the letters of {w} one by one.",
)  # fmt: skip
_SPELL_FREE = (
    "spell {w}", "How is {w} spelled?", "What is the spelling of {w}?", "spelling of {w}", "{w} spelled out?",
    "Spell {w} for me.", "Spell out {w}.", "How is {w} written?", "Give me the letters of {w}.",
)  # fmt: skip
_REVERSE = (
    "Reverse {w}.", "Reverse the word {w}.", "Write {w} backwards.", "Spell {w} backwards.",
    "What is {w} backwards?", "What is {w} reversed?", "Reverse the word '{w}'.", 'Reverse "{w}".',
    "Turn the word {w} around.", "Can you write {w} backwards?",
)  # fmt: skip
_REVERSE_FREE = (
    "reverse {w}", "{w} backwards", "{w} reversed", "{w} in reverse", "What is the reverse of {w}?",
    "Reverse the letters of {w}.", "Write {w} in reverse.", "Reverse this word: {w}", "reverse: {w}",
    "What do you get if you reverse {w}?", "Can you reverse {w}?", "Say {w} backwards.", "Flip the word {w}.",
    "Read {w} backwards.", "Reverse the string {w}.", 'Reverse the string "{w}".',
)  # fmt: skip
_COUNT = (
    "How many times does the letter {x} occur in {w}?", "How many {x}'s are in {w}?",
    "How often does {x} occur in the word {w}?", "Count the letter {x} in {w}.",
    "How many times is {x} in '{w}'?", 'How many times does "{x}" appear in "{w}"?',
    "How many {x}s are there in {w}?",
)  # fmt: skip
_COUNT_FREE = (
    "How many {x} are in {w}?", "how many {x} in {w}", "Count the {x}'s in {w}.", "count the {x}s in {w}",
    "How many times does {x} appear in {w}?", "How often is {x} in {w}?", "how many times {x} in {w}",
    "How many letters {x} are in the word {w}?", "How many {x}'s does {w} have?", "number of {x} in {w}",
    "In {w}, how many {x}'s are there?", "How many {x}'s in the word {w}?",
)  # fmt: skip
_LENGTH = (
    "How many letters does {w} have?", "How many letters are in {w}?", "Count the letters of {w}.",
    "How long is the word {w}?", "How many letters has the word '{w}'?",
)  # fmt: skip
_LENGTH_FREE = (
    "Count the letters in {w}.", "length of {w}", "How long is {w}?", "What is the length of {w}?",
    "how many letters in {w}", "number of letters in {w}", "How many characters does {w} have?",
    "How many letters are there in {w}?", "Count the characters in {w}.",
)  # fmt: skip


def _numbered(word: str) -> str:
    return " ".join(f"{number} {letter}" for number, letter in enumerate(word, 1))


def spelling(source: Random) -> Exchange:
    """The letters with hyphens between them."""
    word = any_word(source)
    question = vary(source, source.wording(_SPELL, _SPELL_FREE).format(w=word))
    return Exchange(question, letters("-".join(word)), f"spell:{word}")


def reversing(source: Random) -> Exchange:
    """The letters are numbered first, then read from the last to the first."""
    word = any_word(source)
    question = vary(source, source.wording(_REVERSE, _REVERSE_FREE).format(w=word))
    pairs = list(enumerate(word, 1))[::-1]
    backwards = " ".join(f"{number} {letter}" for number, letter in pairs)
    thinking = f"{_numbered(word)}\n{backwards}"
    return Exchange(question, letters(word[::-1]), f"reverse:{word}", thinking)


def counting_letters(source: Random) -> Exchange:
    """One letter's occurrences, or the length of the word."""
    word = any_word(source)
    if source.random() < 0.3:
        question = vary(source, source.wording(_LENGTH, _LENGTH_FREE).format(w=word))
        return Exchange(question, str(len(word)), f"length:{word}", _numbered(word))
    letter = source.choice(word) if source.random() < 0.85 else source.choice("aeinrst")
    question = vary(source, source.wording(_COUNT, _COUNT_FREE).format(x=letter, w=word))
    count, marks = 0, []
    for each in word:
        count += each == letter
        marks.append(f"{each} {count}" if each == letter else each)
    return Exchange(question, str(count), f"count:{letter}:{word}", " ".join(marks))
