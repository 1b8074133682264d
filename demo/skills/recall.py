"""Remembering what was said earlier in the conversation."""

from __future__ import annotations

from penstock.demo.exchange import Exchange, Random, vary
from penstock.demo.skills.talk import small_talk
from penstock.demo.words import (
    ANIMALS,
    CITIES,
    COLORS,
    JOBS,
    NAMES,
    any_city,
    any_name,
    invented_word,
)

_FACTS = {
    "name": (
        ("My name is {v}.", "I am {v}.", "Hello, my name is {v}.", "Call me {v}."),
        "Nice to meet you, {v}!",
        ("What is my name?", "Do you know my name?", "Who am I?", "What's my name?"),
        "Your name is {v}.",
        "You have not told me your name.",
    ),
    "color": (
        (
            "My favourite color is {v}.",
            "I like {v} best of all colors.",
            "The color I like most is {v}.",
        ),
        "{v} is a nice color.",
        ("What is my favourite color?", "Which color do I like?", "Do you remember my color?"),
        "Your favourite color is {v}.",
        "You have not told me your favourite color.",
    ),
    "city": (
        ("I live in {v}.", "My home is in {v}.", "I come from {v}."),
        "I have heard that {v} is worth a visit.",
        ("Where do I live?", "In which city do I live?", "Where is my home?"),
        "You live in {v}.",
        "You have not told me where you live.",
    ),
    "job": (
        ("I work as a {v}.", "I am a {v} by profession.", "My job is {v}."),
        "Being a {v} is an interesting job.",
        ("What is my job?", "What do I do for a living?", "Do you know my profession?"),
        "You work as a {v}.",
        "You have not told me your job.",
    ),
    "pet": (
        ("I have a {v}.", "My pet is a {v}.", "A {v} lives with me."),
        "A {v} is a good companion.",
        ("What pet do I have?", "Which animal do I have?", "What is my pet?"),
        "You have a {v}.",
        "You have not told me about a pet.",
    ),
    "number": (
        ("My lucky number is {v}.", "Remember the number {v}.", "Keep the number {v} in mind."),
        "I will remember {v}.",
        ("What is my number?", "Which number should you remember?", "What was the number?"),
        "The number is {v}.",
        "You have not told me a number.",
    ),
    "word": (
        ("The code word is {v}.", "Remember the word {v}.", "Our secret word is {v}."),
        "I will remember {v}.",
        ("What is the code word?", "Which word should you remember?", "What was the word?"),
        "The word is {v}.",
        "You have not told me a word.",
    ),
}

_QUESTIONS_FREE = {
    "name": ("What did I say my name is?", "Do you remember my name?", "my name?", "what am I called",
             "Can you tell me my name?", "Tell me my name."),
    "color": ("What color do I like?", "What is my favorite color?", "my favourite color?"),
    "city": ("where do I live", "What city do I live in?", "Do you remember where I live?"),
    "job": ("What do I work as?", "What is my profession?", "what do I do"),
    "pet": ("What animal do I have?", "Do you remember my pet?", "which pet do I have"),
    "number": ("What was my number?", "Do you remember the number?", "Which number did I tell you?"),
    "word": ("What was the code word?", "Do you remember the word?", "Which word did I tell you?"),
}  # fmt: skip


def _value(source: Random, fact: str) -> str:
    match fact:
        case "name":
            return any_name(source)
        case "city":
            return any_city(source)
        case "color":
            return source.choice(COLORS)
        case "job":
            return source.choice(JOBS)
        case "pet":
            return source.choice(ANIMALS)
        case "number":
            return str(source.randint(1, 9999))
    return invented_word(source)


def _tell(source: Random, fact: str, value: str) -> Exchange:
    statements, reply, _, _, _ = _FACTS[fact]
    said = source.choice(statements).format(v=value)
    answer = reply.format(v=value)
    answer = answer[0].upper() + answer[1:] if not value[0].isdigit() else answer
    if source.free and source.random() < 0.5:
        said = said.rstrip(".")
        known = value in NAMES or value in CITIES or value.islower() or value.isdigit()
        said = said.lower() if known and source.random() < 0.7 else said[0].lower() + said[1:]
    return Exchange(said, answer, f"tell:{said}")


def recall(source: Random) -> Exchange:
    """One to three facts and some talk, then a question about one of them, or about none."""
    facts = source.sample(list(_FACTS), source.randint(1, 3))
    known = {fact: _value(source, fact) for fact in facts}
    before: list[Exchange] = []
    for fact, value in known.items():
        before.append(_tell(source, fact, value))
        if source.random() < 0.4:
            before.append(small_talk(source))
    asked = source.choice(facts)
    if source.random() < 0.1:
        asked = source.choice([fact for fact in _FACTS if fact not in known])
    _, _, questions, answer, unknown = _FACTS[asked]
    question = vary(source, source.wording(questions, _QUESTIONS_FREE[asked]))
    told = answer.format(v=known[asked]) if asked in known else unknown
    key = f"recall:{asked}:{sorted(known.items())}"
    return Exchange(question, told, key, before=before)
