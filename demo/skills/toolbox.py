"""The tools that conversations offer: known ones, and ones made up on the spot."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from penstock.demo.exchange import Random, Tool
from penstock.demo.words import COLORS, JOBS, THINGS, WEEKDAYS, any_city, any_name, invented_word

Value = str | int
_LANGUAGES = "German French Spanish Italian Polish Dutch Greek Turkish Finnish Danish".split()
_ROOMS = "kitchen bedroom bathroom office garage hall cellar attic".split()
_CURRENCIES = "EUR USD GBP CHF JPY SEK PLN CAD".split()


def _small(source: Random) -> int:
    return source.randint(1, 99)


def _amount(source: Random) -> int:
    return source.randint(1, 9999)


def _time(source: Random) -> str:
    return f"{source.randint(0, 23):02}:{source.randint(0, 59):02}"


def _date(source: Random) -> str:
    return f"20{source.randint(20, 40)}-{source.randint(1, 12):02}-{source.randint(1, 28):02}"


def _pick(values: list[str] | tuple[str, ...]) -> Callable[[Random], str]:
    return lambda source: source.choice(values)


def _phrase(source: Random) -> str:
    return " ".join(source.sample(THINGS, source.randint(1, 3)))


@dataclasses.dataclass(frozen=True, slots=True)
class Parameter:
    """One argument of a tool, and where its values come from."""

    name: str
    type: str
    draw: Callable[[Random], Value]


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """One tool, and the requests that want it."""

    name: str
    description: str
    parameters: tuple[Parameter, ...]
    requests: tuple[str, ...]
    result: str = ""
    """What the model says when the tool has answered; ``{r}`` is the answer."""

    def offer(self) -> Tool:
        """The tool as clients write it."""
        return offer(self.name, self.description, {p.name: p.type for p in self.parameters})


def offer(name: str, description: str, parameters: dict[str, str]) -> Tool:
    """One entry of ``tools``; every parameter is required."""
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in parameters.items()},
        "required": list(parameters),
    }
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


def _text(name: str, draw: Callable[[Random], Value]) -> Parameter:
    return Parameter(name, "string", draw)


def _whole(name: str, draw: Callable[[Random], Value]) -> Parameter:
    return Parameter(name, "integer", draw)


KNOWN = (
    Known("get_weather", "Get the current weather of a city.", (_text("city", any_city),),
          ("What is the weather in {city}?", "How is the weather in {city}?", "Weather in {city}?",
           "Tell me the weather in {city}.", "Is it raining in {city}?"),
          "The weather in {city}: {r}."),
    Known("get_time", "Get the current time in a city.", (_text("city", any_city),),
          ("What time is it in {city}?", "Tell me the time in {city}.", "How late is it in {city}?"),
          "It is {r} in {city}."),
    Known("send_message", "Send a message to a person.",
          (_text("to", any_name), _text("text", _phrase)),
          ("Send {to} the message '{text}'.", "Write to {to}: {text}", "Tell {to} '{text}'."),
          "I sent your message to {to}."),
    Known("set_alarm", "Set an alarm.", (_text("time", _time),),
          ("Set an alarm for {time}.", "Wake me at {time}.", "I need an alarm at {time}."),
          "The alarm is set for {time}."),
    Known("set_timer", "Start a timer.", (_whole("minutes", _small),),
          ("Set a timer for {minutes} minutes.", "Start a timer of {minutes} minutes.",
           "Remind me in {minutes} minutes."),
          "The timer runs for {minutes} minutes."),
    Known("convert_currency", "Convert an amount of money.",
          (_whole("amount", _amount), _text("from", _pick(_CURRENCIES)), _text("to", _pick(_CURRENCIES))),
          ("Convert {amount} {from} to {to}.", "How much are {amount} {from} in {to}?",
           "What is {amount} {from} in {to}?"),
          "{amount} {from} are {r} {to}."),
    Known("translate", "Translate a text.",
          (_text("text", _phrase), _text("language", _pick(_LANGUAGES))),
          ("Translate '{text}' to {language}.", "How do you say '{text}' in {language}?",
           "What is '{text}' in {language}?"),
          "In {language}: {r}."),
    Known("book_table", "Book a table in a restaurant.",
          (_text("name", any_name), _whole("people", _small), _text("time", _time)),
          ("Book a table for {people} people at {time} in the name of {name}.",
           "A table for {people} at {time} please, name {name}.",
           "Reserve a table at {time} for {people} people for {name}."),
          "The table for {people} people is booked at {time}."),
    Known("turn_on_light", "Turn on the light in a room.", (_text("room", _pick(_ROOMS)),),
          ("Turn on the light in the {room}.", "Light in the {room} please.",
           "Switch the {room} light on."),
          "The light in the {room} is on."),
    Known("set_temperature", "Set the temperature of a room.",
          (_text("room", _pick(_ROOMS)), _whole("degrees", _small)),
          ("Set the {room} to {degrees} degrees.", "Heat the {room} to {degrees} degrees.",
           "I want {degrees} degrees in the {room}."),
          "The {room} is set to {degrees} degrees."),
    Known("add_event", "Add an event to the calendar.",
          (_text("title", _phrase), _text("date", _date)),
          ("Add '{title}' to my calendar on {date}.", "Put '{title}' on {date} in the calendar.",
           "Note '{title}' for {date}."),
          "I added '{title}' on {date}."),
    Known("search_web", "Search the web.", (_text("query", _phrase),),
          ("Search the web for {query}.", "Look up {query} on the web.", "Search for {query}."),
          "I found this: {r}."),
    Known("get_stock", "Get how many pieces of an item are in stock.",
          (_text("item", _pick(THINGS)),),
          ("How many pieces of {item} are in stock?", "Is {item} in stock?",
           "Check the stock of {item}."),
          "There are {r} pieces of {item} in stock."),
    Known("order_item", "Order an item.",
          (_text("item", _pick(THINGS)), _whole("quantity", _small)),
          ("Order {quantity} pieces of {item}.", "Buy {quantity} of {item}.",
           "I need {quantity} pieces of {item}, order them."),
          "I ordered {quantity} pieces of {item}."),
    Known("play_music", "Play a song.", (_text("song", _phrase),),
          ("Play the song '{song}'.", "Play '{song}'.", "I want to hear '{song}'."),
          "Now playing '{song}'."),
    Known("find_route", "Find the way between two cities.",
          (_text("start", any_city), _text("end", any_city)),
          ("How do I get from {start} to {end}?", "Find a route from {start} to {end}.",
           "Show me the way from {start} to {end}."),
          "The way from {start} to {end}: {r}."),
    Known("get_phone_number", "Look up a person's phone number.", (_text("name", any_name),),
          ("What is the phone number of {name}?", "Give me {name}'s phone number.",
           "Look up the number of {name}."),
          "The number of {name} is {r}."),
    Known("create_user", "Create a user account.",
          (_text("name", any_name), _text("role", _pick(JOBS))),
          ("Create an account for {name} as {role}.", "Add the user {name} with the role {role}.",
           "New user: {name}, role {role}."),
          "The account of {name} is ready."),
    Known("paint", "Paint a thing in a colour.",
          (_text("thing", _pick(THINGS)), _text("color", _pick(COLORS))),
          ("Paint the {thing} {color}.", "Make the {thing} {color}.", "Color the {thing} {color}."),
          "The {thing} is {color} now."),
    Known("open_hours", "Get the opening hours of a place on a weekday.",
          (_text("place", _pick(THINGS)), _text("day", _pick(WEEKDAYS))),
          ("When does the {place} open on {day}?", "Opening hours of the {place} on {day}?",
           "Is the {place} open on {day}?"),
          "On {day}: {r}."),
)  # fmt: skip
_VERBS = "get set check start stop open close read write find make move count show".split()


def invented(source: Random) -> Known:
    """A tool that the model has never seen; its requests name the verb and the thing."""
    verb, thing = source.choice(_VERBS), source.choice(THINGS)
    if source.random() < 0.4:
        thing = invented_word(source, 8)
    kinds = (
        _whole("number", _amount), _text("name", any_name), _text("color", _pick(COLORS)),
        _text("city", any_city), _whole("level", _small), _text("code", invented_word),
        _text("date", _date), _text("day", _pick(WEEKDAYS)),
    )  # fmt: skip
    chosen = tuple(source.sample(kinds, source.randint(1, 3)))
    listed = ", ".join(f"{p.name} {{{p.name}}}" for p in chosen)
    requests = (
        f"{verb.capitalize()} the {thing}: {listed}.", f"{verb.capitalize()} the {thing} with {listed}.",
        f"Please {verb} the {thing} with {listed}.",
    )  # fmt: skip
    return Known(f"{verb}_{thing}", f"{verb.capitalize()} the {thing}.", chosen, requests, "Done.")
