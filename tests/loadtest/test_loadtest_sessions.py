"""Conversations, agent sessions and traces: what each request holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.loadtest.client.dataset_file import BadDataset
from penstock.loadtest.client.prompts import Prompt, RandomShape
from penstock.loadtest.client.replay import Replay, read_trace
from penstock.loadtest.client.serve_options import parse
from penstock.loadtest.client.sessions import (
    AgentShape,
    Answer,
    Conversations,
    Session,
    Turn,
    agent_sessions,
    conversations,
)
from penstock.loadtest.client.workload import Workload

IDS = range(1000)


def content(prompt: Prompt) -> Any:
    return json.loads(bytes(prompt.content))


SESSION = Session([1, 2], [Turn([3], [9], 2), Turn([4, 5], [8], 2)])


def test_a_turn_repeats_all_that_was_said_but_what_was_of_its_own_turn_alone() -> None:
    made = Conversations([SESSION], "ids")
    assert content(made.prompt(0, ())) == [1, 2, 3, 9]
    assert content(made.prompt(1, [Answer("x", [6, 7])])) == [1, 2, 3, 6, 7, 4, 5, 8]
    assert (made.turns, made.output_lens, made.input_lens) == ([2], [2, 2], [4, 8])


def test_where_the_server_tells_no_tokens_of_an_answer_others_stand_for_them() -> None:
    made = Conversations([SESSION], "ids")
    assert content(made.prompt(1, [Answer("x", [])])) == [1, 2, 3, 3, 3, 4, 5, 8]


def test_a_chat_has_messages_and_a_text_goes_on() -> None:
    words = Session(["be", "brief"], [Turn(["hi"], [], 2), Turn(["and", "then"], ["now"], 2)])
    answers = [Answer("well", [])]
    chat = Conversations([words], "chat").prompt(1, answers)
    assert chat.is_messages
    assert content(chat) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "well"},
        {"role": "user", "content": "and then now"},
    ]
    text = Conversations([words], "text").prompt(1, answers)
    assert content(text) == "be brief hi well and then now"


def test_requests_are_numbered_conversation_by_conversation() -> None:
    shape = RandomShape(input_len=5, output_len=3, prefix_len=4, prefix_count=2)
    made = conversations(6, (2, 4), shape, 0, IDS)
    source = Conversations(made, "ids")
    assert set(source.turns) <= {2, 3, 4}
    assert len(set(source.turns)) > 1
    assert len(source.output_lens) == sum(source.turns)
    second = source.prompt(source.turns[0], ())
    assert content(second) == made[1].opening + made[1].turns[0].added
    assert made[0].opening == made[2].opening != made[1].opening
    assert made == conversations(6, (2, 4), shape, 0, IDS)
    assert made != conversations(6, (2, 4), shape, 1, IDS)


def shares(shape: AgentShape) -> tuple[float, float]:
    """Prefix hits and tokens in for one out of a session, by its prompts alone."""
    (session,) = agent_sessions(1, shape, 0, range(100_000))
    made = Conversations([session], "ids")
    # No id of an answer is one of a prompt.
    answers = [
        Answer("", [200_000 + turn * 1000 + n for n in range(shape.output_len)])
        for turn in range(shape.turns)
    ]
    hits = total = 0
    before: list[int] = []
    for turn in range(shape.turns):
        ids = content(made.prompt(turn, answers[:turn]))
        known = before
        same = next(
            (n for n, (a, b) in enumerate(zip(ids, known, strict=False)) if a != b),
            min(len(ids), len(known)),
        )
        hits, total = hits + same, total + len(ids)
        before = [*ids, *answers[turn].ids]
    return hits / total, total / (shape.turns * shape.output_len)


@pytest.mark.parametrize("output_len", [8, 100])
def test_an_agents_session_has_33_turns_94_percent_hits_and_131_tokens_in_for_one_out(
    output_len: int,
) -> None:
    shape = AgentShape(output_len)
    assert shape.turns == 33
    hits, ratio = shares(shape)
    assert hits == pytest.approx(0.94, abs=0.003)
    assert ratio == pytest.approx(131, rel=0.005)


@pytest.mark.parametrize(("turns", "hits", "ratio"), [(10, 0.7, 50), (50, 0.96, 60), (4, 0.6, 30)])
def test_sessions_of_another_shape_have_it_too(turns: int, hits: float, ratio: float) -> None:
    found = shares(AgentShape(40, turns, hits, ratio))
    assert found == pytest.approx((hits, ratio), rel=0.01)


def test_a_shape_that_cannot_be_is_refused_with_the_flags_that_change_it() -> None:
    with pytest.raises(BadDataset, match=r"99\.0% prefix hits") as caught:
        Workload(parse(["--dataset-name", "agent", "--agent-prefix-hits", "0.99"]), chat=False)
    assert "--turns" in str(caught.value)


def recorded(folder: Path, text: str, *flags: str, chat: bool = True) -> Workload:
    path = folder / "talk"
    path.write_text(text)
    named = ["--dataset-name", "conversation", "--dataset-path", str(path)]
    return Workload(parse([*named, *flags]), chat=chat)


def test_conversations_of_a_file_have_its_questions_and_the_servers_answers(tmp_path: Path) -> None:
    lines = '{"turns": ["a b", "c"], "system": "s", "max_tokens": 7}\n{"turns": ["d"]}\n'
    made = recorded(tmp_path, lines, "--num-prompts", "3")
    assert made.source.turns == [2, 1, 2]
    assert made.source.output_lens == [7, 7, 128, 7, 7]
    assert made.source.input_lens == [None] * 5
    assert "2 prompts of the file" in made.notes[0]
    assert content(made.source.prompt(1, [Answer("well", [])])) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a b"},
        {"role": "assistant", "content": "well"},
        {"role": "user", "content": "c"},
    ]
    text = recorded(tmp_path, lines, "--num-prompts", "1", "--output-len", "3", chat=False)
    assert content(text.source.prompt(1, [Answer("well", [])])) == "s a b well c"
    assert text.source.output_lens == [3, 3]


def test_conversations_of_sharegpt_ask_for_as_much_as_was_answered(tmp_path: Path) -> None:
    said = [("human", "one"), ("gpt", "w" * 40), ("human", "two"), ("gpt", "w" * 80)]
    turns = [{"from": who, "value": what} for who, what in said]
    talks = [{"conversations": turns}, {"conversations": [{"from": "gpt", "value": "alone"}]}]
    made = recorded(tmp_path, json.dumps(talks), "--num-prompts", "1")
    assert (made.source.turns, made.source.output_lens) == ([2], [10, 20])


@pytest.mark.parametrize("text", ["", '{"turns": []}', '{"turns": 3}', "[3]"])
def test_a_file_without_conversations_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadDataset, match="talk"):
        recorded(tmp_path, text)


MOONCAKE = [
    {"timestamp": 3000, "input_length": 10, "output_length": 5, "hash_ids": [1, 2, 3]},
    {"timestamp": 1000, "input_length": 8, "output_length": 6, "hash_ids": [1, 2]},
    {"timestamp": 2000, "input_length": 6, "output_length": 0, "hash_ids": [7]},
]


def trace(folder: Path, *lines: dict[str, Any]) -> str:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def replay(path: str, **how: Any) -> Replay:
    known: dict[str, Any] = {"speed": 1.0, "block": 4, "vocab_size": 1000}
    form = how.pop("form", "ids")
    return Replay(read_trace(path, 128), form, how.pop("seed", 0), **(known | how))


def test_a_trace_keeps_its_times_lengths_and_shared_blocks(tmp_path: Path) -> None:
    made = replay(trace(tmp_path, *MOONCAKE), speed=2.0)
    assert made.arrivals == [0.0, 0.5, 1.0]
    assert (made.input_lens, made.output_lens) == ([8, 6, 10], [6, 1, 5])
    first, other, third = (content(made.prompt(n, ())) for n in range(3))
    assert [len(one) for one in (first, other, third)] == [8, 6, 10]
    assert third[:8] == first
    assert other[:4] != first[:4]
    again = replay(trace(tmp_path, *MOONCAKE))
    assert content(again.prompt(0, ())) == first
    assert content(replay(trace(tmp_path, *MOONCAKE), seed=1).prompt(0, ())) != first


def test_a_trace_in_words_has_as_many(tmp_path: Path) -> None:
    made = replay(trace(tmp_path, *MOONCAKE), form="chat")
    assert len(content(made.prompt(0, ())).split(" ")) == 8


def test_a_trace_may_hold_its_prompts_and_our_schedulers_may_be_replayed(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    path = trace(
        tmp_path,
        {"arrival": 0.5, "prompt": [1, 2], "max_tokens": 3},
        {"arrival": 0.75, "prompt": 7, "output": 4, "tenant": "docs", "priority": 1},
    )
    made = replay(path)
    assert content(made.prompt(0, ())) == [1, 2]
    assert (made.arrivals, made.input_lens, made.output_lens) == ([0.0, 0.25], [2, 7], [3, 4])
    chat = replay(trace(tmp_path, {"timestamp": 0, "messages": messages}), form="chat")
    prompt = chat.prompt(0, ())
    assert (content(prompt), prompt.is_messages, prompt.output_len) == (messages, True, 128)
    recorded = Path(__file__).resolve().parents[2] / "loadtest/studies/traces/three_tenants.jsonl"
    assert len(read_trace(str(recorded), 128)) > 100


def test_azures_traces_are_read(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n"
    )
    made = replay(str(path))
    assert made.arrivals == pytest.approx([0.0, 0.052], abs=1e-4)
    assert (made.input_lens, made.output_lens) == ([4808, 3180], [10, 8])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2"),
        ('{"input_length": 3}', "timestamp"),
        ('{"timestamp": 3}', "input_length"),
        ('{"timestamp": 3, "input_length": 0}', "input_length"),
    ],
)
def test_a_bad_line_of_a_trace_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 3}\n' + line)
    with pytest.raises(BadDataset, match="line 2") as caught:
        read_trace(str(path), 1)
    assert words in str(caught.value)


def test_requests_of_a_trace_that_the_server_must_refuse_are_left_out_and_that_is_noted(
    tmp_path: Path,
) -> None:
    flags = ["--dataset-name", "trace", "--dataset-path", trace(tmp_path, *MOONCAKE)]
    made = Workload(parse(flags), chat=False)
    made.check_lengths(14)
    assert made.source.input_lens == [8, 6]
    assert made.source.arrivals == [0.0, 1.0]
    assert "1 of the trace's 3 requests" in made.notes[0]
    with pytest.raises(BadDataset, match="every request"):
        Workload(parse(flags), chat=False).check_lengths(3)
