"""Schemas, regexes and grammars that would loop, explode or crash the one who compiles them."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.pipeline.served import Served
from support.security.siege import Attacker, members

COMPLETIONS = "/v1/completions"
ANSWER_SECONDS = 6.0
"""The vetting ends after 0.8 s, and another process may hold it up; without it these grammars take
minutes."""


def nested(levels: int) -> Any:
    schema: Any = {"type": "null"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


REFUSED: dict[str, dict[str, Any]] = {
    "an unknown type": {"json": {"type": "strin"}},
    "an unclosed group": {"regex": "(a"},
    "an unclosed class": {"regex": "[a"},
    "an unclosed repetition": {"regex": "a{2"},
    "repetitions of repetitions": {"regex": "(x{1,999}){999}"},
    "30,000 parentheses": {"regex": "(" * 30_000 + ")" * 30_000},
    "a reference to itself": {"json": {"$ref": "#"}},
    "references in a circle": {
        "json": {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
        }
    },
    "a foreign document": {"json": {"$ref": "http://127.0.0.1/secret.json"}},
    "an enum of 100,000 values": {"json": {"enum": [f"value {n}" for n in range(100_000)]}},
    "a length of a thousand million": {"json": {"type": "string", "minLength": 10**9}},
    "an empty grammar": {"grammar": ""},
    "a grammar of blanks": {"grammar": "  \n "},
    "a grammar that only refers to itself": {"grammar": "start: start"},
    "no choice": {"choice": []},
    "100,000 choices": {"choice": [str(n) for n in range(100_000)]},
    "an option of the compiler": {"json": {"type": "object", "x-guidance": {"lenient": True}}},
    "two at once": {"regex": "a", "choice": ["b"]},
    "an unknown key": {"regexp": "a"},
    "look-behind": {"regex": "(?<=a)b"},
}
SERVED: dict[str, dict[str, Any]] = {
    "nested plus": {"regex": "(a+)+"},
    "the same twice": {"regex": "(a|a)*b"},
    "left recursion": {"grammar": 'start: start "a" | "b"'},
    "an object": {"json_object": True},
}
EITHER: dict[str, dict[str, Any]] = {
    "a grammar that is ambiguous without end": {"grammar": "start: start start start | start | "},
    "one of every character": {"grammar": "start: start start start | start start | /./"},
}
"""What they cost depends on the answer: refused, or followed as long as it goes."""


def ask(attack: Attacker, wanted: dict[str, Any], *, stream: bool = False) -> tuple[int, str]:
    body = {"prompt": "x", "max_tokens": 8, "structured_outputs": wanted, "stream": stream}
    answer = attack.post(COMPLETIONS, body)
    shown = "" if answer.status == 200 else answer.message
    return answer.status, shown


def quickly(attack: Attacker, wanted: dict[str, Any]) -> tuple[int, str, float]:
    """The status, the message, and the seconds beyond those of a plain refusal beside it."""
    began = time.monotonic()
    attack.post(COMPLETIONS, {"prompt": "x", "temperature": -1})
    plain = time.monotonic() - began
    began = time.monotonic()
    status, message = ask(attack, wanted)
    return status, message, time.monotonic() - began - plain


@pytest.fixture(autouse=True)
def vetted_before(attack: Attacker) -> None:
    """The helper that vets grammars reads the vocabulary at the first one."""
    assert ask(attack, SERVED["an object"])[0] == 200


def test_hostile_grammars_are_refused_in_a_second_and_the_next_one_is_served(
    attack: Attacker,
) -> None:
    for name, wanted in REFUSED.items():
        status, message, seconds = quickly(attack, wanted)
        assert status == 400, (name, status, message)
        assert "structured_outputs" in message or "response_format" in message, (name, message)
        assert len(message) < 700, name
        assert seconds < ANSWER_SECONDS, (name, seconds)
        assert ask(attack, SERVED["an object"])[0] == 200, name


def test_grammars_that_only_look_hostile_are_served(attack: Attacker) -> None:
    for name, wanted in SERVED.items():
        status, message, seconds = quickly(attack, wanted)
        assert status == 200, (name, message)
        assert seconds < ANSWER_SECONDS + 2, name
        assert ask(attack, wanted, stream=True)[0] == 200, name


def test_ambiguous_grammars_end_in_one_way_or_the_other(attack: Attacker) -> None:
    for name, wanted in EITHER.items():
        status, message, seconds = quickly(attack, wanted)
        assert status in (200, 400), (name, message)
        assert seconds < ANSWER_SECONDS + 2, name
        assert ask(attack, SERVED["an object"])[0] == 200, name


def test_a_schema_of_five_thousand_levels_reaches_no_compiler(attack: Attacker) -> None:
    text = json.dumps(nested(20)).replace("null", "null")
    deep = '{"type":"object","properties":{"a":' * 5000 + "{}" + "}}" * 5000
    for schema, expected in ((text, 200), (deep, 400)):
        body = json.dumps(
            {"prompt": "x", "max_tokens": 4, "structured_outputs": {"json": schema}}
        ).encode()
        answer = attack.post(COMPLETIONS, body)
        assert answer.status == expected, answer.body[:300]
    raw = b'{"prompt":"x","max_tokens":4,"structured_outputs":{"json":' + deep.encode() + b"}}"
    assert attack.post(COMPLETIONS, raw).status == 400


def test_many_hostile_grammars_at_once_leave_room_for_a_good_one(attack: Attacker) -> None:
    slow = [{"regex": f"(x{{1,999}}){{99{n}}}"} for n in range(6)]
    statuses: list[int] = []
    threads = [
        threading.Thread(target=lambda one=one: statuses.append(ask(attack, one)[0]))
        for one in slow
    ]
    for thread in threads:
        thread.start()
    assert ask(attack, {"regex": "[0-9]{1,3}"})[0] in (200, 503)
    for thread in threads:
        thread.join()
    assert set(statuses) <= {400, 503}
    assert ask(attack, {"regex": "[0-9]{1,4}"})[0] == 200


def written(server: Served) -> int:
    """Bytes that all its processes have written to file systems; one of them vets grammars."""
    return sum(one.io_counters().write_bytes for one in server.processes().values())


@pytest.mark.parametrize("count", [20, pytest.param(20_000, marks=pytest.mark.chaos)])
def test_unique_schemas_leave_nothing_on_the_disk_and_little_in_memory(
    attack: Attacker, count: int
) -> None:
    processes = members(attack.server)
    before = {pid: one.memory_info().rss for pid, one in processes.items()}
    on_disk = written(attack.server)

    def one(number: int) -> tuple[int, str]:
        schema = {"type": "object", "properties": {f"name {number}": {"type": "integer"}}}
        return ask(attack, {"json": schema})

    with ThreadPoolExecutor(4) as clients:
        for status, message in clients.map(one, range(count)):
            assert status == 200, message
    assert members(attack.server).keys() == before.keys(), "no process was lost"
    assert written(attack.server) - on_disk < 2**20
    for pid, one in processes.items():
        grown = one.memory_info().rss - before[pid]
        assert grown < 160 * 2**20, (one.cmdline(), grown)
