"""Greetings, questions about Penstock and its model, and questions that it cannot answer."""

from __future__ import annotations

from penstock.demo.exchange import Exchange, Random, vary
from penstock.demo.skills.facts import (
    FLAGS,
    MORE_QUESTIONS,
    QUESTIONS,
    default_answer,
    flag_answer,
)
from penstock.demo.skills.terms import COMMANDS, TERMS
from penstock.demo.words import ANIMALS, COLORS, JOBS, THINGS, any_city, any_name, invented_word

_HELP = "How can I help you?"
_GREETINGS = (
    (("Hello", "Hi", "Hey", "Hello there", "Hi there", "Good day", "Greetings", "Hallo"), f"Hello! {_HELP}"),
    (("Good morning", "Morning", "A good morning to you"), f"Good morning! {_HELP}"),
    (("Good evening", "Evening", "A good evening to you"), f"Good evening! {_HELP}"),
    (("Thanks", "Thank you", "Thank you very much", "Thanks a lot", "Many thanks", "Great, thanks",
      "Perfect, thank you"), "You are welcome!"),
    (("Bye", "Goodbye", "See you", "See you later", "Good night", "Bye bye", "Until next time"), "Goodbye!"),
    (("How are you?", "How are you doing?", "How do you do?", "How is it going?", "Are you well?"),
     f"I am fine, thank you. {_HELP}"),
    (("OK", "Okay", "Good", "Great", "Nice", "Fine", "Cool", "Very good"), "Good! What else can I do for you?"),
    (("Test", "Is this on?", "Are you there?", "Can you hear me?", "Ping"), "I am here and I read you."),
)  # fmt: skip
_MORE_GREETINGS = (
    (("hi", "hello", "hey", "hey there", "yo", "hi all", "hello hello", "hiya", "hello world", "good afternoon",
      "hello penstock", "hi bot", "Hello, model", "howdy", "heya", "hey man"), f"Hello! {_HELP}"),
    (("what's up", "whats up", "hey, what's up?", "hey there, whats up?", "sup", "how are things",
      "how are you today", "hi, how are you?", "How's it going?", "hello, how are you", "how r u", "you ok?"),
     f"I am fine, thank you. {_HELP}"),
    (("thx", "ty", "thanks!", "thank you so much", "cheers", "thanks for your help", "great, thank you"),
     "You are welcome!"),
    (("cya", "bye!", "good bye", "i have to go", "see ya", "that's all"), "Goodbye!"),
    (("ok", "nice!", "good job", "well done", "awesome", "yes", "correct", "right", "wow", "not bad", "lol",
      "i see", "interesting", "You are great."), "Good! What else can I do for you?"),
    (("test", "testing", "testing 1 2 3", "anyone there?", "are you there"), "I am here and I read you."),
)  # fmt: skip
_BEFORE = (
    "Tell me: ", "Please tell me: ", "One question: ", "Hi! ", "Hello. ", "Hey, ", "So, ",
    "I have a question. ", "Quick question: ",
)  # fmt: skip
_SIGNS = ("", "", ".", "!", "!!", "?", " :)", ", Penstock", ", Penstock!", " you", " friend")
_UNKNOWN = (
    "Who is the president of {c}?", "What is the capital of {c}?", "When was {c} founded?",
    "How many people live in {c}?", "Who wrote the book '{w}'?", "Who painted '{w}'?",
    "When was {n} born?", "What is the meaning of {w}?", "Who won the game in {c}?",
    "What will the price of a {t} be tomorrow?", "Will it rain in {c} tomorrow?",
    "What is {n} doing right now?", "How tall is {n}?", "What is the phone number of {n}?",
    "Who invented the {t}?", "What does '{w}' mean in Latin?", "How far is it from {c} to {d}?",
    "What happened in {c} in the year {y}?", "Who was born in {c} in {y}?",
    "What is the news from {c}?", "How old is {n}?", "Where does {n} live?",
    "What is the height of the tower in {c}?", "Which team won in {y}?", "What did {n} say in {y}?",
    "How much does a {t} cost in {c}?", "Is {n} at home?", "Who is {n}?", "What is in my {t}?",
)  # fmt: skip
_UNKNOWN_FREE = (
    "what is the capital of {c}", "who is {n}", "Tell me a joke.", "tell me a joke about {t}s", "Write a poem.",
    "Write a poem about a {t}.", "write me a song about {c}", "Write a Python program about a {t}.",
    "What is the weather?", "What is the weather today?", "what's the weather in {c}", "How do I cook {t}?",
    "Why is the {t} {k}?", "Who is the king of {c}?", "Translate '{t}' to French.", "{w}", "{w} {v}", "{v}!",
    "what is a {t}", "What is a {a}?", "Do you like {t}s?", "What is your favourite {t}?", "Do you know {n}?",
    "What is the best {t}?", "where is {c}", "How do I get to {c}?", "What is the population of {c}?",
    "Who won in {y}?", "What happened in {y}?", "Who was the first {j}?", "How do I become a {j}?",
    "What is the meaning of life?", "Is there life on Mars?", "Why is the sky blue?", "Can a {a} fly?",
    "How long does a {a} live?", "Recommend a {t}.", "Should I buy a {t}?", "What is love?", "I am bored.",
    "Write an email to {n}.", "Summarize the history of {c}.", "Do you have feelings?", "Give me a recipe.",
    "Sing a song.", "Explain {w}.", "Explain quantum physics.", "explain how a {t} works", "Write code.",
    "What do you think about {c}?", "Who is the best {j}?", "What does a {j} do?", "Draw a {a}.", "why?",
    "Translate '{t}' into German.", "Translate '{v} {t}' into Spanish.", "translate {t} to german", "Say '{t}' in Italian.",
    "What is the square root of {y}?", "sqrt of {y}", "How many moons does {w} have?", "how many {t}s are in {c}",
    "Play a game with me.", "What color is a {a}?", "Fix my {t}.", "Continue: {w} {v}", "{w} {v} {w}?",
)  # fmt: skip
DO_NOT_KNOW = "I do not know that. I am a small model and know only what I was trained on."
_DEFINE = (
    "What is {x}?", "What does {x} mean?", "Explain {x}.", "Tell me about {x}.", "What is meant by {x}?",
    "Can you explain {x}?", "What's {x}?", "Explain {x} to me.", "Do you know what {x} is?",
    "I want to know what {x} is.", "Describe {x}.", "In short, what is {x}?", "What is {x} in Penstock?",
    "What does Penstock mean by {x}?", "Could you tell me what {x} is?", "Define {x}.",
)  # fmt: skip
_DEFINE_FREE = (
    "{x}?", "{x}", "what are {x}", "what's {x}", "meaning of {x}", "I'd like to know what {x} is.",
    "how does {x} work", "What does {x} do?", "what is {x} good for", "Why is there {x}?", "define {x}",
)  # fmt: skip
_FLAG = (
    "What does {x} do?", "What does the flag {x} do?", "Explain {x}.", "What is {x} for?", "What is {x}?",
    "What is the flag {x}?", "What does {x} mean?", "Tell me about {x}.", "Explain the flag {x}.",
    "Explain the option {x}.", "What does the option {x} set?", "What is the meaning of {x}?",
    "Can you explain {x}?", "When do I need {x}?", "What happens with {x}?",
    "What does `penstock serve {x}` do?",
)  # fmt: skip
_DEFAULT = (
    "What is the default of {x}?", "Which default does {x} have?", "Default of {x}?",
    "What is the default value of {x}?", "What is {x} by default?", "How is {x} set by default?",
    "What value has {x} if I do not set it?", "Tell me the default of {x}.",
)  # fmt: skip
_FLAG_FREE = (
    "{x}", "{x}?", "what is {x}", "what does {x} do", "{x} meaning", "what's {x}", "why {x}", "help {x}",
    "What is {x} good for?", "How do I use {x}?", "describe {x}", "What's the {x} flag?",
)  # fmt: skip
_DEFAULT_FREE = (
    "default of {x}", "{x} default", "what's the default for {x}", "What is the default for {x}?",
    "which value does {x} have by default",
)  # fmt: skip
_COMMAND = (
    "What does `{x}` do?", "What does {x} do?", "Explain the command {x}.", "What is `{x}` for?",
    "When do I use {x}?", "What happens when I run {x}?", "Tell me about `{x}`.", "Explain `{x}`.",
    "What is the command {x} for?", "What can I do with {x}?",
)  # fmt: skip


def _question(source: Random, text: str, answer: str, kind: str, *, lower: bool = True) -> Exchange:
    """Held out by wording: every fact is learned, some ways to ask for it are not."""
    question = vary(source, text, lower=lower)
    return Exchange(question, answer, f"{kind}:{question}")


def greeting(source: Random) -> Exchange:
    """Hello, goodbye, thanks; now and then with a name."""
    if source.random() < 0.2:
        name = any_name(source)
        said = source.choice(
            ("Hello, I am {n}", "Hi, I'm {n}", "Hi, my name is {n}", "{n} here, hello")
        )
        return _question(
            source, said.format(n=name) + ".", f"Hello, {name}! {_HELP}", "greet", lower=False
        )
    phrases, answer = source.wording(_GREETINGS, _MORE_GREETINGS)
    phrase = source.choice(phrases)
    if phrase[-1] != "?":
        phrase += source.choice(_SIGNS)
    return _question(source, phrase, answer, "greet")


def about(source: Random) -> Exchange:
    """What Penstock is, what its terms mean, what the model can do."""
    if source.random() < 0.5:
        questions, answer = source.wording(QUESTIONS, MORE_QUESTIONS)
        question = source.choice(questions)
        if source.random() < 0.3:
            question = source.choice(_BEFORE) + question
        return _question(source, question, answer, "about")
    names, answer = source.choice(TERMS)
    template = source.wording(_DEFINE, _DEFINE_FREE)
    return _question(source, template.format(x=source.choice(names)), answer, "about")


def flags(source: Random) -> Exchange:
    """What a flag means and what its default is; what a command does."""
    dice = source.random()
    if dice < 0.2:
        command, answer = source.choice(COMMANDS)
        template = source.choice(_COMMAND)
        return _question(source, template.format(x=command), answer, "flag")
    flag = source.choice(list(FLAGS))
    name = flag
    if "-" in flag[2:] and source.random() < 0.25:
        name = flag[2:].replace("-", "_")
    if dice < 0.4:
        text = source.wording(_DEFAULT, _DEFAULT_FREE).format(x=name)
        return _question(source, text, default_answer(flag), "flag")
    text = source.wording(_FLAG, _FLAG_FREE).format(x=name)
    return _question(source, text, flag_answer(flag), "flag")


def unknown(source: Random) -> Exchange:
    """Questions about the world, which the model has never seen."""
    words = {
        "c": any_city(source), "d": any_city(source), "n": any_name(source),
        "w": invented_word(source), "t": source.choice(THINGS), "y": source.randint(1000, 2030),
    }  # fmt: skip
    if source.free:
        more = {"v": invented_word(source), "k": source.choice(COLORS), "a": source.choice(ANIMALS)}
        words |= {**more, "j": source.choice(JOBS)}
    question = vary(source, source.wording(_UNKNOWN, _UNKNOWN_FREE).format(**words))
    return Exchange(question, DO_NOT_KNOW, f"unknown:{question}")


def small_talk(source: Random) -> Exchange:
    """Something to say between two other things, without a name in it."""
    while True:
        exchange = source.choice((greeting, about, unknown))(source)
        if not exchange.answer.startswith("Hello, "):
            return exchange
