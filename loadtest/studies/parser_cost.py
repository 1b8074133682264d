"""What the parser of tool calls and thinking costs a token, beside the detokenizer: µs of CPU.

    python -m penstock.loadtest.studies.parser_cost

Tokens are words with the space before them, and single characters; none is a mark.
"""

from __future__ import annotations

import argparse
import json
import re
import time

from penstock.services.tokenizer.output.families import FAMILIES
from penstock.services.tokenizer.output.machine import Vocabulary, build_machine
from penstock.services.tokenizer.output.parser import OutputParser
from penstock.services.tokenizer.output.tool_schemas import ToolSchemas

TOKEN = re.compile(r" ?\w+|\W")
WORDS = "plain words, and no syntax at all."
BEGUN = '<tool_call>{"name": "f", "arguments": {"a": '
OUTPUTS = {
    "an answer": ("json_tags", "", WORDS),
    "thinking": ("json_tags", "<think>", WORDS),
    "an answer with code": ("json_tags", "", "if (a < b) { return x[1]; }\n"),
    "a text among JSON arguments": ("json_tags", BEGUN + '"', WORDS),
    "JSON arguments": ("json_tags", BEGUN, '[1, "b", {"c": true}], '),
    "a parameter in XML": ("xml_parameters", "<function=f><parameter=a>", WORDS),
    "an argument of a Python call": ("python_calls", "[f(a='", WORDS),
    "a text in harmony": ("harmony", "<|channel|>final<|message|>", WORDS),
}
"""What is read → its family, what stands before it, and what comes again and again."""


def cost(family: str, begin: str, part: str, tokens: int) -> float:
    """Seconds of CPU a token; the least of five runs."""
    machine = build_machine(FAMILIES[family], Vocabulary({}))
    each = TOKEN.findall(part)
    pieces = (each * (tokens // len(each) + 1))[:tokens]
    found = []
    for _ in range(5):
        parser = OutputParser(machine, ToolSchemas({"f": None}), lambda index, name: f"id {index}")
        parser.push(0, begin)
        began = time.process_time()
        for piece in pieces:
            parser.push(0, piece)
        found.append((time.process_time() - began) / tokens)
    return min(found)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    options.add_argument("--tokens", type=int, default=50_000)
    tokens = options.parse_args().tokens
    for name, (family, begin, part) in OUTPUTS.items():
        micros = round(cost(family, begin, part, tokens) * 1e6, 3)
        print(json.dumps({"what": name, "family": family, "us_per_token": micros}), flush=True)


if __name__ == "__main__":
    main()
