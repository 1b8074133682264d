"""Prompts at random and from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from penstock.loadtest.client.dataset_file import (
    BadDataset,
    read_jsonl,
    read_sharegpt,
    token_counter,
)
from penstock.loadtest.client.prompts import Prompt, RandomShape, random_prompts
from penstock.loadtest.client.serve_options import parse
from penstock.loadtest.client.workload import Workload
from penstock.loadtest.models.make_model import make_model


def content(prompt: Prompt) -> Any:
    return json.loads(bytes(prompt.content))


def make(count: int = 50, seed: int | str = 0, **shape: Any) -> list[Prompt]:
    lengths = {"input_len": 100, "output_len": 40, **shape}
    return random_prompts(count, RandomShape(**lengths), seed, vocab_size=256, as_text=False)


def workload(*flags: str, chat: bool = False) -> Workload:
    return Workload(parse(flags), chat=chat)


def test_random_prompts_have_the_asked_lengths_and_ids_below_the_vocabulary() -> None:
    for prompt in make():
        ids = content(prompt)
        assert (len(ids), prompt.input_len, prompt.output_len) == (100, 100, 40)
        assert all(0 <= token < 256 for token in ids)


def test_the_range_ratio_spreads_lengths_evenly_on_both_sides() -> None:
    prompts = make(2000, range_ratio=0.5)
    inputs = [len(content(p)) for p in prompts]
    outputs = [p.output_len for p in prompts]
    assert (min(inputs), max(inputs)) == (50, 150)
    assert (min(outputs), max(outputs)) == (20, 60)
    assert sum(inputs) / 2000 == pytest.approx(100, rel=0.03)


def test_the_prefix_is_shared_and_comes_on_top() -> None:
    made = [content(p) for p in make(20, prefix_len=30)]
    assert {len(ids) for ids in made} == {130}
    assert len({tuple(ids[:30]) for ids in made}) == 1
    assert len({tuple(ids[30:]) for ids in made}) == 20


def test_several_prefixes_are_taken_in_turn() -> None:
    made = [content(p) for p in make(6, prefix_len=30, prefix_count=3)]
    assert len({tuple(ids[:30]) for ids in made}) == 3
    assert [made[n][:30] == made[n + 3][:30] for n in range(3)] == [True] * 3


def test_the_same_seed_makes_the_same_prompts() -> None:
    assert make(seed=3) == make(seed=3) != make(seed=4)


def test_text_has_as_many_words() -> None:
    shape = RandomShape(input_len=10, output_len=1, prefix_len=5)
    (prompt,) = random_prompts(1, shape, 0, vocab_size=1, as_text=True)
    assert len(content(prompt).split(" ")) == 15


def test_warm_up_prompts_share_nothing_with_the_measured_ones() -> None:
    made = workload("--random-prefix-len", "20", "--num-prompts", "5", "--warmup-requests", "5")
    measured = {tuple(content(p)[:20]) for p in made.prompts}
    assert len(measured) == 1
    assert not measured & {tuple(content(p)[:20]) for p in made.warmup}


def sharegpt(folder: Path, *pairs: tuple[str, str]) -> str:
    path = folder / "share.json"
    path.write_text(
        json.dumps(
            [
                {
                    "id": "x",
                    "conversations": [
                        {"from": "human", "value": question},
                        {"from": "gpt", "value": answer},
                        {"from": "human", "value": "and then?"},
                    ],
                }
                for question, answer in pairs
            ]
            + [{"id": "y", "conversations": [{"from": "human", "value": "alone"}]}]
        )
    )
    return str(path)


def test_sharegpt_keeps_first_pairs_within_the_usual_limits(tmp_path: Path) -> None:
    good = "w" * 400, "w" * 80
    path = sharegpt(
        tmp_path, good, ("w" * 8, "w" * 80), ("w" * 80, "w" * 8),
        ("w" * 5000, "w" * 80), ("w" * 4000, "w" * 5000),
    )  # fmt: skip
    (prompt,) = read_sharegpt(path, 0, token_counter(None), None)
    assert (content(prompt), prompt.input_len, prompt.output_len) == (good[0], 100, 20)


def test_sharegpt_counts_with_the_tokenizer_that_is_named(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    question, answer = "7 + 8 = 15; " * 9, "水は流れる。" * 9
    path = sharegpt(tmp_path, (question, answer))
    (prompt,) = read_sharegpt(path, 0, token_counter(str(folder)), None)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    expected = [len(tokenizer.encode(text)) for text in (question, answer)]
    assert [prompt.input_len, prompt.output_len] == expected
    assert expected != [len(question) / 4, len(answer) / 4]


def test_sharegpt_is_shuffled_by_the_seed(tmp_path: Path) -> None:
    path = sharegpt(tmp_path, *((f"question {n:03}" * 4, "answer" * 9) for n in range(30)))
    count = token_counter(None)
    first = read_sharegpt(path, 0, count, None)
    assert first == read_sharegpt(path, 0, count, None)
    assert first != read_sharegpt(path, 1, count, None)
    assert {p.output_len for p in read_sharegpt(path, 0, count, 7)} == {7}


def test_jsonl_takes_text_ids_and_messages(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    lines: list[dict[str, Any]] = [
        {"prompt": "hello", "max_tokens": 5},
        {"prompt": [1, 2, 3], "output_tokens": 6},
        {"messages": messages},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    text, ids, chat = read_jsonl(str(path), token_counter(None), None, 9)
    assert (content(text), text.output_len) == ("hello", 5)
    assert (content(ids), ids.output_len, ids.input_len, ids.is_ids) == ([1, 2, 3], 6, 3, True)
    assert (content(chat), chat.output_len, chat.is_messages) == (messages, 9, True)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2"),
        ('{"prompt": 3}', "line 2"),
        ("{}", "either prompt or messages"),
        ('{"prompt": "a", "messages": []}', "either prompt or messages"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n' + line)
    with pytest.raises(BadDataset, match="line 2") as caught:
        read_jsonl(str(path), token_counter(None), None, 9)
    assert words in str(caught.value)


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.json")
    with pytest.raises(BadDataset, match=r"none\.json"):
        read_sharegpt(missing, 0, token_counter(None), None)
    with pytest.raises(BadDataset, match="--tokenizer"):
        token_counter(missing)
    empty = tmp_path / "empty"
    empty.write_text("[]")
    with pytest.raises(BadDataset, match="0 conversations"):
        read_sharegpt(str(empty), 0, token_counter(None), None)


def test_a_short_file_is_repeated_and_that_is_noted(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    made = workload("--dataset-name", "jsonl", "--dataset-path", str(path), "--num-prompts", "5")
    assert [content(p) for p in made.prompts] == ["a", "b", "a", "b", "a"]
    assert "2 prompts" in made.notes[0]


def test_forms_that_the_endpoint_cannot_take_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    flags = ["--dataset-name", "jsonl", "--dataset-path", str(path)]
    path.write_text('{"prompt": [1]}')
    with pytest.raises(BadDataset, match="/v1/completions"):
        workload(*flags, chat=True)
    path.write_text('{"messages": []}')
    with pytest.raises(BadDataset, match="/v1/chat/completions"):
        workload(*flags)
    with pytest.raises(BadDataset, match="--random-format"):
        workload("--random-format", "tokens", chat=True)
