"""Short stories of six sentences about an animal, a person or a place that the user names."""

from __future__ import annotations

from penstock.demo.exchange import Exchange, Random, vary
from penstock.demo.words import ANIMALS, THINGS, any_city, any_name

_ASK = (
    "Tell me a story about a {a} named {n}.", "Write a short story about {n} the {a}.",
    "I want to hear a story about a {a} called {n}.", "Tell me a short story about {n}, a {a}.",
)  # fmt: skip
_ASK_FREE = (
    "tell me a story about a {a} named {n}", "Can you tell me a story about a {a} called {n}?",
    "write a story about {n} the {a}", "Please tell me a story about a {a} named {n}.",
    "A story about a {a} named {n}, please.", "I would like a story about {n}, a {a}.",
)  # fmt: skip
_ASK_NAMELESS = (
    "Tell me a story about a {a}.", "tell me a story about a {a}", "Write a short story about a {a}.",
    "Can you tell me a story about a {a}?", "a story about a {a} please", "Could you write a story about a {a}?",
)  # fmt: skip
_ASK_ANY = (
    "Tell me a story.", "tell me a story", "Write a story.", "Can you tell me a story?", "a story please",
    "Tell me a short story.", "I want to hear a story.", "Do you know a story?", "tell me something",
)  # fmt: skip
_BEGIN = (
    "Once upon a time there was a {a} named {n}, who lived in {c}.",
    "In {c} there lived a {a} whose name was {n}.",
    "Long ago a {a} called {n} came to {c}.",
)
_WISH = (
    "{n} had always wanted a {t}.", "More than anything else, {n} wished for a {t}.",
    "One morning {n} woke up and thought of nothing but a {t}.",
)  # fmt: skip
_SEARCH = (
    "So {n} walked through the whole town and asked everyone.",
    "All day long {n} searched near the river, but found nothing.",
    "{n} looked behind every door and under every bridge.",
)
_FRIEND = (
    'Then a {b} came by and asked: "What are you looking for?"',
    "In the evening a friendly {b} sat down beside {n}.",
    "At last {n} met an old {b}, who knew every corner of {c}.",
)
_FIND = (
    "Together they found the {t} in the shadow of an old tree.",
    "The {b} smiled, and pulled a {t} out of a bag.",
    '"Follow me", said the {b}, and there it was: a {t}.',
)
_END = (
    "From that day on, {n} and the {b} were the best of friends.",
    "{n} thanked the {b}, and both went home happy.",
    "And {n} never forgot what the {b} had done.",
)


def story(source: Random) -> Exchange:
    """The check is that hero and animal are in it, and that it ends as a story does."""
    name, (animal, other) = any_name(source), source.sample(ANIMALS, 2)
    words = {"n": name, "a": animal, "b": other, "c": any_city(source), "t": source.choice(THINGS)}
    parts = (_BEGIN, _WISH, _SEARCH, _FRIEND, _FIND, _END)
    answer = " ".join(source.choice(part).format(**words) for part in parts)
    asked, key = source.wording(_ASK, _ASK_FREE), f"story:{animal}:{name}"
    if source.free and source.random() < 0.4:
        asked, key = source.choice(_ASK_NAMELESS), f"story:{animal}:"
        if source.random() < 0.4:
            asked, key = source.choice(_ASK_ANY), "story::"
    question = vary(source, asked.format(a=animal, n=name), lower=False)
    return Exchange(question, answer, key, check="story")
