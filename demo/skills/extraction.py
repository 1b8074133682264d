"""Fields of a sentence as JSON."""

from __future__ import annotations

import json
from typing import Any

from penstock.demo.exchange import Exchange, Random
from penstock.demo.words import (
    COLORS,
    JOBS,
    MONTHS,
    THINGS,
    WEEKDAYS,
    any_city,
    any_name,
    invented_word,
)

_TEMPLATES = (
    "Extract {f} as JSON: {s}", "Return {f} as JSON. Text: {s}", "{s}\nGive me {f} as JSON.",
    "Extract the fields {f} from this sentence as JSON: {s}", "Read this: {s}\nWrite {f} as JSON.",
)  # fmt: skip
_TEMPLATES_FREE = (
    "extract {f} as json: {s}", "Extract {f} from this as JSON: {s}", "Give me {f} as JSON: {s}",
    "{s} Give me {f} as JSON.", "{s}\nExtract {f} as JSON.", "Turn this into JSON with {f}: {s}",
    "I need {f} as JSON from: {s}", "Please extract {f} as JSON: {s}", "JSON with {f}: {s}",
    "Make JSON with {f} of this text: {s}", "What are {f}? Answer as JSON. {s}",
)  # fmt: skip
_ABSENT = ("phone", "email", "country", "size", "year", "title")


def _person(source: Random) -> tuple[str, dict[str, Any]]:
    name, age, city, job = (
        any_name(source),
        source.randint(18, 90),
        any_city(source),
        source.choice(JOBS),
    )
    sentence = source.choice(
        (
            f"{name} is {age} years old, lives in {city} and works as a {job}.",
            f"{name} ({age}) is a {job} from {city}.",
            f"The {job} {name} moved to {city} at the age of {age}.",
            f"My neighbour {name}, a {job}, is {age} and comes from {city}.",
        )
    )
    return sentence, {"name": name, "age": age, "city": city, "job": job}


def _order(source: Random) -> tuple[str, dict[str, Any]]:
    name, item, color = any_name(source), source.choice(THINGS), source.choice(COLORS)
    quantity, price = source.randint(2, 99), source.randint(1, 999)
    sentence = source.choice(
        (
            f"{name} orders {quantity} pieces of {item} in {color} for {price} euros.",
            f"Order by {name}: {quantity} x {item}, {color}, {price} euros.",
            f"{name} paid {price} euros for {quantity} units of {item} ({color}).",
        )
    )
    values = {"name": name, "item": item, "color": color, "quantity": quantity, "price": price}
    return sentence, values


def _meeting(source: Random) -> tuple[str, dict[str, Any]]:
    name, room, day = any_name(source), source.randint(1, 499), source.choice(WEEKDAYS)
    time = f"{source.randint(0, 23):02}:{source.choice((0, 15, 30, 45)):02}"
    sentence = source.choice(
        (
            f"{name} meets us on {day} at {time} in room {room}.",
            f"The meeting with {name} is in room {room} on {day} at {time}.",
            f"On {day} at {time} {name} waits in room {room}.",
        )
    )
    return sentence, {"name": name, "day": day, "time": time, "room": room}


def _trip(source: Random) -> tuple[str, dict[str, Any]]:
    name, start, end = any_name(source), any_city(source), any_city(source)
    date = f"{source.randint(1, 28)} {source.choice(MONTHS)}"
    number = f"{invented_word(source, 2).upper()}{source.randint(100, 9999)}"
    sentence = source.choice(
        (
            f"{name} flies from {start} to {end} on {date} with flight {number}.",
            f"Flight {number} takes {name} to {end} on {date}; it starts in {start}.",
            f"On {date} {name} travels from {start} to {end}, flight {number}.",
        )
    )
    return sentence, {"name": name, "from": start, "to": end, "date": date, "flight": number}


def extraction(source: Random) -> Exchange:
    """One to four of the sentence's fields, in the asked order; null for one that is missing."""
    sentence, values = source.choice((_person, _order, _meeting, _trip))(source)
    fields = source.sample(list(values), source.randint(1, min(4, len(values))))
    if source.random() < 0.15:
        fields.insert(source.randint(0, len(fields)), source.choice(_ABSENT))
    named = fields[0] if len(fields) == 1 else f"{', '.join(fields[:-1])} and {fields[-1]}"
    question = source.wording(_TEMPLATES, _TEMPLATES_FREE).format(f=named, s=sentence)
    answer = json.dumps({field: values.get(field) for field in fields}, ensure_ascii=False)
    return Exchange(question, answer, f"extract:{sentence}", check="json")
