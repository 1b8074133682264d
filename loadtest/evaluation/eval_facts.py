"""Plain facts in English, as sentences to be ended: the questions of ``penstock eval --set facts``.

Each table holds a sentence's beginning and pairs of what it is about and how it ends. A question
offers the right end and three of the same table that are wrong.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

OPTIONS = 4
_SEED = 7


class Question(NamedTuple):
    """A sentence without its end, and the ends to choose from."""

    table: str
    stem: str
    options: list[str]
    """Each begins with a blank."""
    right: int
    """Which of them is true."""


_TABLES: dict[str, tuple[str, str]] = {
    "capitals": (
        "The capital city of {} is",
        "France: Paris; Italy: Rome; Spain: Madrid; Germany: Berlin; England: London; "
        "Ireland: Dublin; Portugal: Lisbon; Austria: Vienna; Greece: Athens; Egypt: Cairo; "
        "Japan: Tokyo; China: Beijing; Russia: Moscow; Sweden: Stockholm; Norway: Oslo; "
        "Finland: Helsinki; Poland: Warsaw; Hungary: Budapest; Cuba: Havana; Canada: Ottawa; "
        "Peru: Lima; Thailand: Bangkok; Kenya: Nairobi; Belgium: Brussels",
    ),
    "opposites": (
        "The opposite of {} is",
        "hot: cold; big: small; up: down; left: right; day: night; open: closed; early: late; "
        "happy: sad; young: old; rich: poor; full: empty; wet: dry; hard: soft; fast: slow; "
        "strong: weak; light: dark; near: far; love: hate; war: peace; true: false; "
        "buy: sell; win: lose; above: below; before: after",
    ),
    "kinds": (
        "A {} is a kind of",
        "trout: fish; sparrow: bird; oak: tree; rose: flower; hammer: tool; violin: instrument; "
        "sofa: furniture; shirt: clothing; wasp: insect; diamond: gem; sedan: car; "
        "carrot: vegetable; cobra: snake; sonnet: poem; iron pot: cookware; poodle: dog",
    ),
    "young": (
        "A young {} is called a",
        "dog: puppy; cat: kitten; cow: calf; sheep: lamb; horse: foal; hen: chick; pig: piglet; "
        "frog: tadpole; duck: duckling; deer: fawn; kangaroo: joey; lion: cub",
    ),
    "languages": (
        "The language that most people speak in {} is",
        "Brazil: Portuguese; Mexico: Spanish; France: French; Germany: German; Japan: Japanese; "
        "Italy: Italian; Russia: Russian; Egypt: Arabic; Poland: Polish; Turkey: Turkish; "
        "Sweden: Swedish; Greece: Greek; Australia: English; Hungary: Hungarian",
    ),
    "numbers": (
        "The number of {} is",
        "days in a week: seven; months in a year: twelve; sides of a triangle: three; "
        "legs of a spider: eight; wheels of a bicycle: two; hours in a day: twenty-four; "
        "legs of an insect: six; fingers on a hand: five; seasons in a year: four; "
        "minutes in an hour: sixty",
    ),
    "tools": (
        "To {}, you use a",
        "cut bread: knife; write on paper with ink: pen; sweep the floor: broom; "
        "drive in a nail: hammer; see the stars: telescope; take a photograph: camera; "
        "open a locked door: key; dig a hole in the ground: shovel; cross a river: boat; "
        "comb your hair: comb; measure the temperature: thermometer; sew a button on: needle",
    ),
    "places": (
        "Someone who works in a {} is most likely a",
        "hospital: nurse; school: teacher; restaurant kitchen: cook; court of law: judge; "
        "bakery: baker; theatre: actor; field of wheat: farmer; bank: banker; "
        "library: librarian; laboratory: scientist; mine: miner; barracks: soldier",
    ),
    "plurals": (
        "The plural of the word {} is",
        "mouse: mice; child: children; foot: feet; tooth: teeth; goose: geese; man: men; "
        "leaf: leaves; knife: knives; ox: oxen; box: boxes",
    ),
}


def facts(most: int | None = None) -> Iterator[Question]:
    """Every question, or the first so many of each table; always the same."""
    for table, (sentence, listed) in _TABLES.items():
        draw = random.Random(f"{_SEED} {table}")
        pairs = [pair.strip().split(": ") for pair in listed.split(";")]
        ends = sorted({end for _, end in pairs})
        for subject, end in pairs[:most]:
            others = draw.sample([each for each in ends if each != end], OPTIONS - 1)
            right = draw.randrange(OPTIONS)
            others.insert(right, end)
            yield Question(table, sentence.format(subject), [f" {each}" for each in others], right)
