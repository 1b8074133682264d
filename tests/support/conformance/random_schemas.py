"""Random JSON schemas of the kinds that clients write; the same seed makes the same schema.

    python tests/support/conformance/random_schemas.py SEED COUNT

prints one schema a line.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

NAMES = (
    *("id", "name", "tags", "size", "unit", "next", "kind", "note", "price", "items", "type"),
    *("$ref", "a b", 'quo"te', "back\\slash", "é", "名", "", "a/b", "x~y", "tab\there", "const"),
)
WORDS = ("red", "green", "blue", "on", "off", 'say "hi"', "línea", "a\nb", "😀", "", "null", "1")
FORMATS = (
    "date",
    "time",
    "date-time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
)
MULTIPLES = (2, 3, 5, 10, 0.5, 0.25, 0.01)
MAX_LEVELS = 4


def random_schema(seed: int) -> Schema:
    """A schema whose root is an object, with definitions that it refers to."""
    return _Maker(random.Random(f"schema {seed}")).root()


class _Maker:
    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._definitions = [f"D{number}" for number in range(dice.randrange(4))]

    def root(self) -> Schema:
        schema = self._object(0)
        if self._definitions:
            schema["$defs"] = {name: self._definition() for name in self._definitions}
        if self._dice.random() < 0.2:
            schema |= {"title": "Answer", "description": "What is asked for."}
        return schema

    def _definition(self) -> Schema:
        """An object: whatever refers to it, one without its optional properties is finite."""
        schema = self._object(2)
        schema["properties"]["again"] = self._dice.choice(
            [{"$ref": "#"}, {"type": "array", "items": self._reference(), "maxItems": 2}]
        )
        return schema

    def _reference(self) -> Schema:
        return {"$ref": f"#/$defs/{self._dice.choice(self._definitions)}"}

    def _any(self, level: int) -> Schema:
        simple: list[Callable[[], Schema]] = [
            *(self._string, self._integer, self._number, self._enum, self._const),
            *(lambda: {"type": "boolean"}, lambda: {"type": "null"}, self._nullable),
        ]
        nested: list[Callable[[int], Schema]] = [
            *(self._object, self._object, self._array, self._tuple, self._any_of),
            *(self._one_of, self._all_of, self._map, self._optional_reference),
        ]
        if level >= MAX_LEVELS or self._dice.random() < 0.55:
            return self._dice.choice(simple)()
        return self._dice.choice(nested)(level + 1)

    def _optional_reference(self, level: int) -> Schema:
        if not self._definitions:
            return self._any(level)
        return {"anyOf": [{"type": "null"}, self._reference()]}

    def _string(self) -> Schema:
        schema: Schema = {"type": "string"}
        kind = self._dice.randrange(5)
        if kind == 0:
            schema["minLength"] = self._dice.randrange(4)
        if kind in (0, 1):
            schema["maxLength"] = self._dice.randrange(4, 12)
        if kind == 2:
            schema["format"] = self._dice.choice(FORMATS)
        if kind == 3:
            schema["pattern"] = self._pattern()
        return schema

    def _pattern(self) -> str:
        body = "".join(self._atom() + self._repeat() for _ in range(self._dice.randrange(1, 5)))
        return self._dice.choice([f"^{body}$", f"^{body}$", f"^{body}", body])

    def _atom(self) -> str:
        atoms = (
            "a",
            "Z",
            "é",
            "[a-f]",
            "[^0-9,]",
            r"\d",
            r"\w",
            ".",
            r"\.",
            r"[\w.-]",
            "(?:no|yes)",
        )
        return self._dice.choice(atoms)

    def _repeat(self) -> str:
        return self._dice.choice(["", "", "+", "?", "{2}", "{1,3}", "*"])

    def _integer(self) -> Schema:
        schema: Schema = {"type": "integer"}
        low = self._dice.randrange(-1000, 1000)
        if self._dice.random() < 0.5:
            schema[self._dice.choice(["minimum", "exclusiveMinimum"])] = low
        if self._dice.random() < 0.5:
            high = low + self._dice.randrange(20, 500)
            schema[self._dice.choice(["maximum", "exclusiveMaximum"])] = high
        if self._dice.random() < 0.2:
            schema["multipleOf"] = self._dice.choice(MULTIPLES[:4])
        return schema

    def _number(self) -> Schema:
        schema: Schema = {"type": "number"}
        low = round(self._dice.uniform(-50, 50), self._dice.randrange(4))
        if self._dice.random() < 0.5:
            schema[self._dice.choice(["minimum", "exclusiveMinimum"])] = low
        if self._dice.random() < 0.5:
            high = round(low + self._dice.uniform(20, 90), self._dice.randrange(4))
            schema[self._dice.choice(["maximum", "exclusiveMaximum"])] = high
        if self._dice.random() < 0.2:
            schema["multipleOf"] = self._dice.choice(MULTIPLES)
        return schema

    def _value(self) -> Any:
        return self._dice.choice(
            [
                self._dice.choice(WORDS),
                self._dice.randrange(-99, 99),
                0.5,
                True,
                None,
                [1, "a"],
                {"k": 1},
            ]
        )

    def _enum(self) -> Schema:
        if self._dice.random() < 0.5:
            return {"enum": self._dice.sample(WORDS, 3), "type": "string"}
        return {"enum": [self._value() for _ in range(3)]}

    def _const(self) -> Schema:
        return {"const": self._value()}

    def _nullable(self) -> Schema:
        schema = self._dice.choice([self._string, self._integer, self._number])()
        return {**schema, "type": [schema["type"], "null"]}

    def _object(self, level: int) -> Schema:
        names = self._dice.sample(NAMES, self._dice.randrange(1, 5))
        schema: Schema = {
            "type": "object",
            "properties": {name: self._any(level + 1) for name in names},
        }
        required = self._dice.sample(names, self._dice.randrange(len(names) + 1))
        if required:
            schema["required"] = required
        more = self._dice.random()
        if more < 0.6:
            schema["additionalProperties"] = False
        elif more < 0.8:
            schema["additionalProperties"] = self._any(MAX_LEVELS)
        return schema

    def _map(self, level: int) -> Schema:
        """An object with names that the schema does not list."""
        schema: Schema = {"type": "object", "additionalProperties": self._any(level + 1)}
        if self._dice.random() < 0.4:
            schema["patternProperties"] = {"^[a-z]{1,3}$": self._any(level + 1)}
            schema["additionalProperties"] = self._dice.choice([False, {"type": "integer"}])
        elif self._dice.random() < 0.3:
            schema["minProperties"] = 1
        if self._dice.random() < 0.3:
            schema["maxProperties"] = self._dice.randrange(1, 4)
        return schema

    def _array(self, level: int) -> Schema:
        schema: Schema = {"type": "array", "items": self._any(level + 1)}
        if self._dice.random() < 0.5:
            schema["minItems"] = self._dice.randrange(3)
        if self._dice.random() < 0.6:
            schema["maxItems"] = self._dice.randrange(2, 5)
        return schema

    def _tuple(self, level: int) -> Schema:
        items = [self._any(level + 1) for _ in range(self._dice.randrange(1, 4))]
        schema: Schema = {"type": "array", "prefixItems": items, "minItems": len(items)}
        schema["items"] = self._dice.choice([False, self._any(MAX_LEVELS)])
        return schema

    def _any_of(self, level: int) -> Schema:
        return {"anyOf": [self._any(level + 1) for _ in range(self._dice.randrange(2, 4))]}

    def _one_of(self, level: int) -> Schema:
        """Objects that a property with a constant tells apart."""
        options = []
        for kind in self._dice.sample(WORDS, 2):
            option = self._object(level + 1)
            option["properties"] = {"kind": {"const": kind}, **option["properties"]}
            option["properties"]["kind"] = {"const": kind}
            option["required"] = sorted({"kind", *option.get("required", ())})
            options.append(option)
        return {"oneOf": options}

    def _all_of(self, level: int) -> Schema:
        """Two objects that both hold, and leave each other's properties free."""
        parts = [self._object(level + 1), self._object(level + 1)]
        for part, names in zip(parts, (NAMES[:11], NAMES[11:]), strict=True):
            part.pop("additionalProperties", None)
            part["properties"] = {
                name: schema for name, schema in part["properties"].items() if name in names
            }
            part["required"] = [name for name in part.get("required", ()) if name in names]
        return {"allOf": parts}


def main() -> int:
    """Print schemas, one a line."""
    if len(sys.argv) != 3 or not all(one.isdigit() for one in sys.argv[1:]):
        print(__doc__, file=sys.stderr)
        return 2
    first, count = map(int, sys.argv[1:])
    for seed in range(first, first + count):
        print(json.dumps(random_schema(seed), ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
