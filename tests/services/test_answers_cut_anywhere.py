"""From tokens to what each API says: however the text of an answer falls into tokens, and tokens
into rows, streams add up to the whole answer, and whole answers are the same."""

from __future__ import annotations

import itertools
import json
import random
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.frontend.folded_streams import (
    check_message_events,
    folded_chat,
    message_events,
    response_items,
)
from support.tokenizer.grammar_follower import END, tokenizer_of
from support.tokenizer.output.broken import broken_outputs, legal_outputs
from support.tokenizer.output.replay import TOOLS
from support.tokenizer.output.wire_forms import FORMS

from penstock.client.answers import Answer, AnswerSink, RequestProgress
from penstock.client.gateway_interface import ServedModel
from penstock.client.meters import Meters
from penstock.client.sink import RowExtras, row_extras
from penstock.protocol.logprobs import PackedLogprobs
from penstock.protocol.ownership.choice import Choice
from penstock.protocol.ownership.guard import TokenExtras
from penstock.protocol.ownership.text_rows import TextRows
from penstock.protocol.process.metrics import Registry
from penstock.protocol.wire.messages.tokens import End, EndReason, RowLogprobs
from penstock.services.frontend.bodies.openai_responses import ResponsesBody
from penstock.services.frontend.body import decode_body, no_pause
from penstock.services.frontend.dialects.anthropic.messages import MessagesDialect
from penstock.services.frontend.dialects.chat import ChatDialect
from penstock.services.frontend.dialects.interface import ChoiceFrames, Renderer
from penstock.services.frontend.dialects.ollama.chat import OllamaChatDialect
from penstock.services.frontend.dialects.responses.renderer import ResponsesRenderer
from penstock.services.frontend.dialects.responses.turn import read_input, turn_of
from penstock.services.frontend.json_lines import encode
from penstock.services.tokenizer.chat_template import ChatTemplate
from penstock.services.tokenizer.output.families import FAMILIES
from penstock.services.tokenizer.output.family import Family
from penstock.services.tokenizer.output.machine import build_machine
from penstock.services.tokenizer.output.tool_schemas import ToolSchemas
from penstock.services.tokenizer.parsed_stream import ParsedStream
from penstock.services.tokenizer.reading import Reading
from penstock.services.tokenizer.text_model import TextModel

MODELS = [ServedModel("m", [], 4096, 1000)]
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
ODD = 'a "b" \\ é日本語😀\n}]}) </a'
NAMES = sorted({form.family for form in FORMS.values()})
Offered = list[tuple[str, dict[str, Any]]]


def _functions(**more: Any) -> list[dict[str, Any]]:
    return [{"name": name, "parameters": schema, **more} for name, schema in TOOLS.items()]


# --- the APIs: how a request of each makes its renderer, and what its stream adds up to


def _chat(**asked: Any) -> Renderer:
    tools = [{"type": "function", "function": one} for one in _functions()]
    body = {**CHAT, "tools": tools, "stream_options": {"include_usage": True}, "stream": True}
    dialect = ChatDialect()
    return dialect.renderer(dialect.parse(encode({**body, **asked}), MODELS), "0" * 32, 0)


def _folded_chat(raw: bytes, whole: dict[str, Any]) -> Any:
    lines = [line.removeprefix("data: ") for line in raw.decode().split("\n\n") if line]
    found = folded_chat([one if one == "[DONE]" else json.loads(one) for one in lines], whole)
    for choice, wanted in zip(found["choices"], whole["choices"], strict=True):
        if wanted["message"]["content"] is None:  # which a stream does not say
            assert choice["message"]["content"] == ""
            choice["message"]["content"] = None
    return found


def _messages(**asked: Any) -> Renderer:
    tools = [{"name": name, "input_schema": schema} for name, schema in TOOLS.items()]
    body = {**CHAT, "tools": tools, "max_tokens": 99, "thinking": {"type": "adaptive"}, **asked}
    dialect = MessagesDialect()
    return dialect.renderer(dialect.parse(encode(body), MODELS), "0" * 32, 0)


def _folded_message(raw: bytes, whole: dict[str, Any]) -> Any:
    events = message_events(raw)
    check_message_events(events)
    message: dict[str, Any] = {}
    arguments: dict[int, str] = {}
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                message["content"].append(event["content_block"])
            case "content_block_delta":
                index, delta = event["index"], dict(event["delta"])
                if delta.pop("type") == "input_json_delta":
                    arguments[index] = arguments.get(index, "") + delta["partial_json"]
                for name in delta.keys() - {"partial_json"}:
                    message["content"][index][name] += delta[name]
            case "message_delta":
                message |= {**event["delta"], "usage": event["usage"]}
    for index, text in arguments.items():
        block = message["content"][index]
        broken = "INVALID_JSON" in whole["content"][index]["input"]
        block["input"] = {"INVALID_JSON": text} if broken else json.loads(text)
    return message


def _response(**asked: Any) -> Renderer:
    tools = [{"type": "function", **one} for one in _functions()]
    body = decode_body(encode({"input": "x", "tools": tools, **asked}), ResponsesBody, no_pause)
    items: Any = read_input(body)
    return ResponsesRenderer(
        turn_of(body, items, items, MODELS, streams=True), "0" * 32, stores=False
    )


def _folded_response(raw: bytes, whole: dict[str, Any]) -> Any:
    blocks = raw.decode().removesuffix("\n\n").split("\n\n")
    events = [json.loads(block.split("\ndata: ", 1)[1]) for block in blocks]
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    done = [one["item"] for one in events if one["type"] == "response.output_item.done"]
    response = events[-1]["response"]
    assert response["output"] == done
    assert [{**one, "status": "completed"} for one in response_items(events)] == done
    return response


def _ollama(**asked: Any) -> Renderer:
    tools = [{"type": "function", "function": one} for one in _functions()]
    dialect = OllamaChatDialect()
    body = {**CHAT, "model": "m", "tools": tools, **asked}
    return dialect.renderer(dialect.parse(encode(body), MODELS), "0" * 32, 0)


def _folded_ollama(raw: bytes, whole: dict[str, Any]) -> Any:
    *lines, last = (json.loads(line) for line in raw.splitlines())
    said: dict[str, Any] = {"role": "assistant", "content": ""}
    for line in lines:
        message = line["message"]
        said["content"] += message["content"]
        for name, empty in (("thinking", ""), ("tool_calls", [])):
            if name in message:
                said[name] = said.get(name, empty) + message[name]
    return {**last, "message": said}


APIS: dict[str, tuple[Callable[..., Renderer], Callable[[bytes, dict[str, Any]], Any]]] = {
    "chat": (_chat, _folded_chat),
    "messages": (_messages, _folded_message),
    "responses": (_response, _folded_response),
    "ollama": (_ollama, _folded_ollama),
}


# --- answers


class Streamed(Answer):
    """Leaves as frames, row by row, as on a connection that takes everything at once."""

    def __init__(self, frames: ChoiceFrames, out: list[bytes], *, direct: bool) -> None:
        super().__init__()
        self._frames, self._raw, self._direct = frames, out, direct

    def add_text(self, text: str) -> None:
        if self._direct:
            self._raw.append(self._frames.prefix + encode(text) + self._frames.suffix)
            self._frames.prefix = self._frames.later
        else:
            super().add_text(text)
            self._take()

    def add(self, text: str, extras: RowExtras) -> None:
        super().add(text, extras)
        self._take()

    def _take(self) -> None:
        self._raw.append(self._frames.render(self))
        self.clear()


class Model:
    """A family's vocabulary, and how its answers are read."""

    def __init__(self, family: Family, as_tokens: bool, *, single: bool = False) -> None:
        self._plain, _, vocabulary = tokenizer_of(family.name, as_tokens)
        template = ChatTemplate("{{ tools }}", {}, path=Path("template"))
        self._text_model = TextModel(self._plain, template)
        self._marks = re.compile("|".join(map(re.escape, sorted(vocabulary.added, reverse=True))))
        self.end = vocabulary.added[END]
        machine = build_machine(family, vocabulary, tools=True, reasoning=True, skips_special=True)
        self._reading = Reading(machine, ToolSchemas(TOOLS), False, False, single=single)

    def tokens(self, text: str, draw: random.Random | None) -> list[int]:
        """The ids of a text, cut at random places that no token spans, and of the end."""
        places = {0, len(text)}
        marked = {n for found in self._marks.finditer(text) for n in range(*found.span())[1:]}
        if draw is not None:
            share = draw.random()
            places |= {n for n in range(len(text)) if n not in marked and draw.random() < share}
        cuts = sorted(places)
        parts = [text[a:b] for a, b in itertools.pairwise(cuts)]
        ids = [n for part in parts for n in self._plain.encode(part, add_special_tokens=False).ids]
        return [*ids, self.end]

    def choice(self, renderer: Renderer, number: int) -> Choice:
        params = renderer.request.params  # type: ignore[attr-defined]
        parser = self._reading.parser(1, number)
        stream = ParsedStream(self._text_model, params, b"", self._reading, parser)
        return Choice(stream, params.logprobs is not None)


def answered(
    model: Model,
    make: Callable[..., Renderer],
    text: str,
    draw: random.Random | None,
    *,
    streams: bool,
    choices: int = 1,
    **asked: Any,
) -> bytes:
    """The stream, or the whole answer, of an answer whose tokens come in rows of random sizes."""
    renderer = make(**asked)
    progress = RequestProgress(1, choices, Meters(Registry()), 0.0, lambda: 1.0)
    usage, raw = progress.usage, list[bytes]()
    answers: list[Answer] = [Answer() for _ in range(choices)]
    if streams:
        direct = renderer.direct
        answers = [Streamed(renderer.choice(n, usage), raw, direct=direct) for n in range(choices)]
    sink = AnswerSink(progress, answers)
    sink.on_accepted(3)
    first = getattr(renderer, "first", None)
    if streams and first is not None:
        raw.append(first(usage))
    rest = {n: model.tokens(text, draw) for n in range(choices)}
    made = {n: model.choice(renderer, n) for n in rest}
    while rest:
        for number in list(rest):
            size = len(rest[number]) if draw is None else draw.choice([1, 1, 2, 7])
            part, rest[number] = rest[number][:size], rest[number][size:]
            if _row(sink, made[number], number, part, ends=not rest[number], stop=model.end):
                del rest[number]
    if streams:
        return b"".join(raw) + renderer.last(usage)
    return renderer.body(answers, usage)


def _row(
    sink: AnswerSink, choice: Choice, number: int, part: Sequence[int], *, ends: bool, stop: int
) -> bool:
    """One row of tokens. Returns whether it has ended the choice."""
    end = End(0, EndReason.STOP, stop) if ends else None
    packed = struct.pack(f"<{len(part)}i", *part)
    content, used, end = choice.push(memoryview(packed).cast("i"), end)
    entries = b"".join(struct.pack("<iif", token, 1, -0.5) for token in part)
    found = RowLogprobs(0, PackedLogprobs(0, entries))
    rows = TextRows()
    rows.add(1, number, 0, choice, used, content, end, TokenExtras(logprobs=found))
    batch = rows.batch()
    extras = row_extras(batch) or {}
    sink.on_row(number, batch.texts[0], batch.counts[0], extras.get(0))
    return end is not None


def outputs(family: Family, count: int) -> list[str]:
    """Right ones, broken ones, and one whose strings are odd."""
    forms = [form for form in FORMS.values() if form.family == family.name]
    calls: Offered = [("search", {"query": ODD, "tags": ["x", ODD]}), ("now", {})]
    odd = [form.write(calls) for form in forms]
    return [*odd, *legal_outputs(family), *broken_outputs(family, count)]


def neutral(answer: Any) -> Any:
    """Without times, and without counts of tokens, which are those of the cut."""
    counts = ("usage", "eval_count", "eval_duration", "logprobs", "created_at", "completed_at")
    if isinstance(answer, dict):
        return {name: neutral(one) for name, one in answer.items() if name not in counts}
    return [neutral(one) for one in answer] if isinstance(answer, list) else answer


def pairs() -> Iterator[Any]:
    """Every second output of one family with every API, and of every family with one; the others
    in the long run."""
    apis = list(APIS)
    for number, name in enumerate(NAMES):
        for place, api in enumerate(apis):
            if name == "json_tags" or place == number % len(apis):
                yield name, api, 2
            yield pytest.param(name, api, 1, marks=pytest.mark.slow)


@pytest.mark.parametrize(("name", "api", "apart"), pairs())
def test_an_answer_is_the_same_however_its_text_falls_into_tokens_and_rows(
    name: str, api: str, apart: int
) -> None:
    family, (make, folded) = FAMILIES[name], APIS[api]
    draw = random.Random(name + api)
    model = Model(family, as_tokens=list(APIS).index(api) % 2 == 0)
    for text in outputs(family, 1)[::apart]:
        first = json.loads(answered(model, make, text, None, streams=False))
        seed = draw.random()
        whole = json.loads(answered(model, make, text, random.Random(seed), streams=False))
        assert neutral(whole) == neutral(first), text
        raw = answered(model, make, text, random.Random(seed), streams=True)
        found = folded(raw, whole)
        assert neutral(found) == neutral(whole), text
        assert found.get("usage") == whole.get("usage"), text


CALLS = FORMS["JSON in tags"].write([("weather", {"city": "Oslo </tool_call> STOP"}), ("now", {})])


@pytest.mark.parametrize("seed", range(4))
def test_choices_with_calls_have_the_logprobs_of_all_their_tokens(seed: int) -> None:
    model, text = Model(FAMILIES["json_tags"], False), f"<think>Hm</think>Well. {CALLS}"
    asked: dict[str, Any] = {"n": 2, "logprobs": True, "choices": 2}
    raw = answered(model, _chat, text, random.Random(seed), streams=True, **asked)
    whole = json.loads(answered(model, _chat, text, random.Random(seed), streams=False, **asked))
    assert _folded_chat(raw, whole) == whole
    for choice in whole["choices"]:
        pieces = b"".join(bytes(one["bytes"]) for one in choice["logprobs"]["content"])
        assert pieces.decode() == text + END
        assert choice["finish_reason"] == "tool_calls"
        city, now = (one["function"] for one in choice["message"]["tool_calls"])
        assert json.loads(city["arguments"]) == {"city": "Oslo </tool_call> STOP"}
        assert now["arguments"] == "{}"
    ids = [one["id"] for choice in whole["choices"] for one in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 4


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("streams", [True, False])
def test_a_stop_string_within_arguments_or_thinking_ends_nothing_and_one_in_words_does(
    seed: int, streams: bool
) -> None:
    model, text = Model(FAMILIES["json_tags"], False), f"<think>STOP</think>{CALLS} So STOP it."
    whole = answered(model, _chat, text, random.Random(seed), streams=False, stop=["STOP"])
    found = json.loads(whole)
    if streams:
        raw = answered(model, _chat, text, random.Random(seed), streams=True, stop=["STOP"])
        found = _folded_chat(raw, found)
    (choice,) = found["choices"]
    assert choice["message"]["content"] == "So "
    assert choice["message"]["reasoning"] == "STOP"
    assert [one["function"]["name"] for one in choice["message"]["tool_calls"]] == [
        "weather",
        "now",
    ]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", "STOP")


CALLED: dict[str, Callable[[Any], list[str]]] = {
    "chat": lambda whole: [
        one["function"]["name"] for one in whole["choices"][0]["message"]["tool_calls"]
    ],
    "messages": lambda whole: [one["name"] for one in whole["content"]],
    "responses": lambda whole: [one["name"] for one in whole["output"]],
    "ollama": lambda whole: [one["function"]["name"] for one in whole["message"]["tool_calls"]],
}
"""The names of all that an answer calls, which holds nothing else."""


@pytest.mark.parametrize("api", APIS)
def test_an_answer_that_may_call_once_ends_with_its_call_in_every_api(api: str) -> None:
    make, folded = APIS[api]
    model = Model(FAMILIES["json_tags"], False, single=True)
    for seed in range(4):
        whole = json.loads(answered(model, make, CALLS, random.Random(seed), streams=False))
        raw = answered(model, make, CALLS, random.Random(seed), streams=True)
        assert neutral(folded(raw, whole)) == neutral(whole)
        assert CALLED[api](whole) == ["weather"]
