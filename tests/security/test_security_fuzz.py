"""Requests drawn at random, good and bad: each gets an answer of its kind, and soon."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from support.security.siege import ANSWER_SECONDS, CHAT, COMPLETIONS, Answer, Attacker

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FIELDS: dict[str, list[Any]] = {
    "prompt": ["x", ["x", "y"], [5, 6, 7], [[5], [6, 7]], ""],
    "messages": [
        [{"role": "user", "content": "hi"}],
        [
            {"role": "system", "content": [{"type": "text", "text": "a"}]},
            {"role": "user", "content": ""},
        ],
    ],
    "model": ["none", None],
    "max_tokens": [1, 3, 3, 3, 0],
    "max_completion_tokens": [2],
    "temperature": [0, 0.7, 2],
    "top_p": [0.5, 1],
    "top_k": [1, 5, -1],
    "min_p": [0.1],
    "n": [1, 2],
    "seed": [0, -7, 2**63 - 1],
    "stop": ["a", ["a", "\n"], None],
    "stop_token_ids": [[5], []],
    "stream": [True, False],
    "stream_options": [{"include_usage": True}],
    "logprobs": [True, 2, 0],
    "top_logprobs": [3],
    "prompt_logprobs": [1],
    "echo": [True],
    "presence_penalty": [1],
    "frequency_penalty": [-2],
    "repetition_penalty": [1.1],
    "logit_bias": [{"5": 10}, {}],
    "allowed_token_ids": [[5, 6]],
    "bad_words": [["a b"]],
    "ignore_eos": [True],
    "min_tokens": [1],
    "response_format": [
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
    ],
    "structured_outputs": [{"regex": "[a-c]{3}"}, {"choice": ["a", "b"]}, {"json": SCHEMA}],
    "truncate_prompt_tokens": [4],
    "priority": [1],
    "deadline_s": [5],
    "cache_salt": ["s"],
    "user": ["u"],
    "metadata": [{"a": "b"}],
    "tools": [[]],
    "unheard_of": [1],
}
"""Values that are right for some request."""
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 0.5, -0.0, 1e308, 2**31, 2**63, 2**64, 10**40, "", "\0",
    "\ud800", "x" * 3000, "\u202e\ufeff", [], [[]], {}, {"": None}, [None], [1, "a", None],
    {"a": {"b": [1]}}, ["\0"],
]  # fmt: skip
"""Values that are wrong for most."""
OTHER_PATHS = [
    "/v1/models", "/v1/models/x", "/v1/models/%00", "/live",
    "/health", "/ready", "/metrics", "/version", "/", "/playground/status", "/playground/schema",
    "/v1/completions/", "/v1//completions", "/v1/%63ompletions", "/%ff", "/../etc/passwd",
]  # fmt: skip
STATUSES = {200, 400, 404, 405, 415}
"""What a request of this kind may be answered with; 500 would be the server's own fault."""


class Drawn:
    """Requests, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def value(self, depth: int = 0) -> Any:
        chance = self._random
        if depth < 4 and chance.random() < 0.3:
            inner = [self.value(depth + 1) for _ in range(chance.randrange(4))]
            if chance.random() < 0.5:
                return inner
            return {chance.choice([*FIELDS, "", "type", "\0"]): value for value in inner}
        return chance.choice(ODD)

    def spoiled(self, value: Any) -> Any:
        """``value`` with one place in it changed."""
        chance = self._random
        if isinstance(value, dict) and value and chance.random() < 0.8:
            key = chance.choice(list(value))
            changed = dict(value)
            if chance.random() < 0.2:
                del changed[key]
            else:
                changed[key] = self.spoiled(value[key])
            return changed
        if isinstance(value, list) and value and chance.random() < 0.8:
            at = chance.randrange(len(value))
            return [*value[:at], self.spoiled(value[at]), *value[at + 1 :]]
        return self.value()

    def fields(self, path: str) -> Any:
        """What a body says: an object, or what became of one."""
        chance = self._random
        first = "messages" if "chat" in path else "prompt"
        names = {
            "max_tokens",
            first,
            *chance.sample(list(FIELDS), chance.choice([0, 1, 1, 2, 2, 4])),
        }
        other = "prompt" if "chat" in path else "messages"
        found: Any = {name: chance.choice(FIELDS[name]) for name in sorted(names - {other})}
        for _ in range(chance.choice([0, 0, 0, 1, 1, 2])):
            found = self.spoiled(found)
        if isinstance(found, dict) and found.get("max_tokens") is None:
            found["max_tokens"] = 3  # else an answer may take as long as the model's limit allows
        return found

    def body(self, path: str) -> bytes:
        chance = self._random
        raw = json.dumps(self.fields(path), ensure_ascii=chance.random() < 0.5)
        data = raw.encode(errors="surrogatepass")
        if chance.random() < 0.15:
            at = chance.randrange(len(data) + 1)
            junk = chance.choice(
                [b"", b"\0", b"\xff", b"{", b"]", b'"', b"\\u0000", b"1e999", b",,"]
            )
            data = data[:at] + junk + data[at + chance.randrange(3) :]
        return data

    def send(self, attacker: Attacker) -> tuple[str, Answer]:
        """One request; what was sent, and its answer."""
        chance = self._random
        path, method = chance.choice([COMPLETIONS, CHAT]), "POST"
        if chance.random() < 0.2:
            path, method = chance.choice(OTHER_PATHS), "GET"
        if chance.random() < 0.05:
            method = chance.choice(
                ["PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "GET", "POST", "BREW"]
            )
        kind = "application/json"
        if chance.random() < 0.05:
            kind = chance.choice(["", "text/plain", "application/json; charset=utf-16", "x" * 300])
        body = self.body(path) if method != "GET" else None
        answer = attacker.request(method, path, body, Content_Type=kind)
        return f"{method} {path} {kind} {body!r}", answer


def check(sent: str, answer: Answer) -> None:
    said = f"{answer.status} {answer.body[:300]!r} for {sent[:1500]}"
    assert answer.status in STATUSES, said
    assert answer.seconds < ANSWER_SECONDS, said
    if answer.status >= 400 and not sent.startswith("HEAD"):
        error = answer.json["error"]
        assert set(error) == {"message", "type", "param", "code"}, said
        assert 0 < len(error["message"]) < 1000, said
    elif "text/event-stream" in answer.headers.get("content-type", ""):
        events = answer.body.decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""], said
        assert all(event.startswith(("data: ", ": ")) for event in events[:-1]), said


@pytest.mark.parametrize(
    ("seed", "count"),
    [(1, 120), *(pytest.param(seed, 5000, marks=pytest.mark.chaos) for seed in (2, 3))],
)
def test_random_requests_get_answers_of_their_kind(seed: int, count: int, attack: Attacker) -> None:
    drawn = Drawn(seed)
    taken = 0
    for _ in range(count):
        sent, answer = drawn.send(attack)
        check(sent, answer)
        taken += answer.status == 200 and sent.startswith("POST")
    assert count * 0.1 < taken < count * 0.6, "neither all refused nor all taken"
