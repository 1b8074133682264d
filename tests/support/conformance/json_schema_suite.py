"""Runs JSON-Schema-Test-Suite against the masks: is every accepted schema enforced?

    python tests/support/conformance/json_schema_suite.py FOLDER [--explain]

FOLDER is the suite's ``tests``, with ``draft2020-12`` and others; in the source archive of the
package ``jsonschema`` it is ``json/tests``. Prints a table with a line for each file, and ends with
code 1 if an answer that the suite calls invalid passes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, permutations, product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))
sys.path.insert(0, str(Path(__file__).parents[2]))

from llguidance import LLMatcher
from support.conformance.schema_masks import compiled, takes

DRAFTS = {
    "draft2020-12": None,
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
}
MAX_ORDERS = 720


@dataclass
class Tally:
    """What came of the schemas of one file of the suite."""

    enforced: int = 0
    narrower: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    values: int = 0

    def add(self, other: Tally) -> None:
        self.enforced += other.enforced
        self.narrower += other.narrower
        self.refused += other.refused
        self.wrong += other.wrong
        self.reasons += other.reasons
        self.values += other.values


def spellings(instance: object) -> Iterator[str]:
    """A value as JSON: without spaces, with Python's, and indented."""
    yield json.dumps(instance, ensure_ascii=False, separators=(",", ":"))
    yield json.dumps(instance, ensure_ascii=False)
    yield json.dumps(instance, ensure_ascii=False, indent=2)


def orders(instance: object) -> Iterator[object]:
    """The same value with the names of its objects in every order."""
    if isinstance(instance, list):
        for items in product(*(list(islice(orders(one), 24)) for one in instance)):
            yield list(items)
    elif isinstance(instance, dict):
        for names in permutations(instance):
            for values in product(*(list(islice(orders(instance[name]), 24)) for name in names)):
                yield dict(zip(names, values, strict=True))
    else:
        yield instance


def whole(instance: Any) -> Any:
    """The same value with 1.0 written as 1."""
    if isinstance(instance, float) and instance.is_integer():
        return int(instance)
    if isinstance(instance, list):
        return [whole(one) for one in instance]
    if isinstance(instance, dict):
        return {name: whole(one) for name, one in instance.items()}
    return instance


def why_narrower(schema: dict[str, Any], matcher: LLMatcher, instance: object) -> str | None:
    """Why a valid value does not pass; ``None`` if it does."""
    text = next(spellings(instance))
    if takes(matcher, text):
        return None
    if takes(matcher, next(spellings(whole(instance)))):
        return "a whole number is written without a fraction"
    if any(takes(matcher, next(spellings(one))) for one in islice(orders(instance), MAX_ORDERS)):
        return "properties come in the schema's order"
    if "format" in schema:
        return f"format {schema['format']}: takes less, or is a note in the suite's default"
    if "draft-0" in schema.get("$schema", "") and "$ref" in json.dumps(schema):
        return "keywords beside $ref hold in drafts 6 and 7, too"
    return "another: " + text[:60]


def run_case(case: dict[str, Any], draft: str | None, tally: Tally, explain: bool) -> None:
    """Compile one schema and put its instances to it."""
    schema = case["schema"]
    tally.values += len(case["tests"])
    if draft and isinstance(schema, dict):
        schema = {"$schema": draft, **schema}
    matcher = compiled(schema)
    if isinstance(matcher, str):
        tally.refused[matcher] += 1
        return
    narrower = False
    wrong = len(tally.wrong)
    for test in case["tests"]:
        if not test["valid"]:
            named = f"{case['description']}: {test['description']}"
            tally.wrong += [named for text in spellings(test["data"]) if takes(matcher, text)]
        elif reason := why_narrower(schema, matcher, test["data"]):
            narrower = True
            tally.reasons[reason] += 1
            if explain:
                print(f"  narrower: {case['description']}: {test['description']}: {reason}")
    if len(tally.wrong) == wrong:
        tally.narrower += narrower
        tally.enforced += not narrower


def run_file(path: Path, draft: str | None, explain: bool) -> Tally:
    """All schemas of one file."""
    tally = Tally()
    for case in json.loads(path.read_text()):
        run_case(case, draft, tally, explain)
    return tally


def line(name: str, tally: Tally) -> str:
    counts = (tally.enforced, tally.narrower, sum(tally.refused.values()), len(tally.wrong))
    return f"| {name} | " + " | ".join(str(count) for count in counts) + " |"


def run_draft(folder: Path, named: str | None, explain: bool) -> Tally:
    """All files of one draft, with a line for each and one for all."""
    total = Tally()
    paths = [*sorted(folder.glob("*.json")), *sorted(folder.glob("optional/format/*.json"))]
    if not paths:
        sys.exit(f"{folder} has no *.json: name the suite's folder tests")
    for path in paths:
        tally = run_file(path, named, explain)
        print(line(path.relative_to(folder.parent).with_suffix("").as_posix(), tally))
        for wrong in tally.wrong:
            print(f"  WRONG: {wrong}")
        if explain:
            for reason, count in tally.refused.items():
                print(f"  refused {count}: {reason}")
        total.add(tally)
    print(line(f"{folder.name}, all", total))
    return total


def main() -> int:
    """Print the table; 1 if anything invalid passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the suite's folder tests")
    parser.add_argument("--explain", action="store_true", help="say why, for each schema")
    arguments = parser.parse_args()
    total = Tally()
    print("| feature | accepted and enforced | narrower | refused | wrong |")
    print("| --- | --- | --- | --- | --- |")
    for draft, named in DRAFTS.items():
        total.add(run_draft(arguments.folder / draft, named, arguments.explain))
    print(line("all", total))
    print(f"\n{total.values} values. Why valid values do not pass:")
    for reason, count in total.reasons.most_common():
        print(f"- {reason}: {count}")
    return 1 if total.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
