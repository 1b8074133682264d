"""What every client asks: the same questions, tools and forms of answers."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

SUM = "What is 17 + 25?"
"""The built-in model thinks about it and answers 42."""
OSLO = "What is the weather in Oslo?"
ANNA = "Extract name, age as JSON: Anna is 36 years old, lives in Oslo and works as a baker."
MAX_TOKENS = 120
TOO_LONG = "word " * 20_000
QUERY = "What is a weir?"
DOCUMENTS = ["A weir is a low dam.", "A turbine turns.", "Water falls."]

WEATHER_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
TIMER_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"minutes": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["minutes"],
    "additionalProperties": False,
}


def function(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """One entry of ``tools`` of a chat completion."""
    described = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": described}


WEATHER = function("get_weather", "Get the current weather of a city.", WEATHER_PARAMETERS)
TIMER = function("set_timer", "Start a timer.", TIMER_PARAMETERS)


class Person(BaseModel, extra="forbid"):
    """A person in a text."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


class Weather:
    """A tool whose first two results are what to ask next, so that a loop makes three calls."""

    NEXT = ("What is the weather in Vienna?", "What is the weather in Rome?")

    def __init__(self) -> None:
        self.cities: list[str] = []

    def get_weather(self, city: str) -> str:
        """Get the current weather of a city.

        Args:
            city: The city.
        """
        self.cities.append(city)
        asked = len(self.cities)
        return self.NEXT[asked - 1] if asked <= len(self.NEXT) else "rain"

    def called_three_times(self) -> bool:
        """With the city of each question, to which the built-in model may add something."""
        wanted = ("Oslo", "Vienna", "Rome")
        return len(self.cities) == 3 and all(map(str.startswith, self.cities, wanted))
