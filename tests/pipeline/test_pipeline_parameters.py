"""Sampling parameters over HTTP, with each other, streamed and not, and beside a neighbour."""

from __future__ import annotations

import asyncio
import itertools
import random
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.pipeline.clients import Answer, ask
from support.pipeline.served import SMALL, Served, SharedServers

VALUES: dict[str, list[Any]] = {
    "temperature": [0, 0.7, 1.6],
    "top_p": [0.2, 0.9],
    "top_k": [1, 40],
    "min_p": [0.02, 0.4],
    "presence_penalty": [-1.5, 2],
    "frequency_penalty": [0.5, -0.5],
    "repetition_penalty": [0.7, 1.9],
    "min_tokens": [3, 20],
    "logit_bias": [{"300": 4.5, "65": -100}, {"2": 100}],
    "allowed_token_ids": [[*range(60, 320)], [2, 70, 71, 72]],
    "bad_words": [["a", "the"], ["penstock"]],
    "stop": ["e", ["water", "a b"]],
    "stop_token_ids": [[70, 71], [300]],
    "include_stop_str_in_output": [True],
    "skip_special_tokens": [False],
    "spaces_between_special_tokens": [False],
    "truncate_prompt_tokens": [1, 7],
    "ignore_eos": [True],
    "n": [3],
    "seed": [5],
    "max_tokens": [20, 24],
    "logprobs": [0, 5],
    "echo": [True],
    "nsigma": [1.5],
    "tfs": [0.9],
    "typical_p": [0.5],
    "xtc_probability": [0.6],
    "dynatemp_max": [1.5],
    "skew": [0.5],
    "mirostat_mode": [2],
    "sampler_order": [["xtc", "top_p", 5]],
    "dry_multiplier": [2.0],
    "no_repeat_ngram_size": [5],
    "structured_outputs": [{"regex": "([a-z]{1,4} ?){2,40}"}, {"choice": ["yes", "no"]}],
}
TAKING = {"allowed_token_ids", "bad_words", "no_repeat_ngram_size"}
"""What may leave a form no token."""
NEIGHBOUR = {"prompt": "The water wheel", "max_tokens": 200, "temperature": 0, "ignore_eos": True}


def pairwise(seed: int) -> list[dict[str, Any]]:
    """Requests in which every two values of different parameters stand together at least once."""
    rng = random.Random(seed)
    choices = [(name, index) for name, values in VALUES.items() for index in range(len(values))]
    missing = {
        frozenset(pair) for pair in itertools.combinations(choices, 2) if pair[0][0] != pair[1][0]
    }
    requests = []
    while missing:
        first = rng.choice(sorted(map(sorted, missing)))
        chosen = dict(first)
        for name in rng.sample(list(VALUES), len(VALUES)):
            if name in chosen:
                continue
            gains = [
                sum(frozenset(((name, i), pair)) in missing for pair in chosen.items())
                for i in range(len(VALUES[name]))
            ]
            if max(gains):
                chosen[name] = gains.index(max(gains))
        missing -= {frozenset(pair) for pair in itertools.combinations(chosen.items(), 2)}
        requests.append({name: VALUES[name][index] for name, index in chosen.items()})
    return requests


@pytest.fixture(scope="module")
def server(small_model: Path, shared_server: SharedServers) -> Served:
    return shared_server(str(small_model), *SMALL)


def asked(server: Served, *bodies: dict[str, Any]) -> list[Answer]:
    async def run() -> list[Answer]:
        timeout = aiohttp.ClientTimeout(total=100)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            return await asyncio.gather(*(ask(session, server.url, body) for body in bodies))

    return asyncio.run(run())


@pytest.mark.slow
def test_all_pairs_of_parameters_give_the_same_streamed_and_not_and_leave_a_neighbour_alone(
    server: Served,
) -> None:
    (alone,) = asked(server, NEIGHBOUR)
    for number, body in enumerate(pairwise(1)):
        # What is asked second finds the prompt in the prefix cache.
        request = {"prompt": f"Number {number} of the mill", "max_tokens": 20, "seed": 3, **body}
        first, neighbour = asked(server, {**request, "stream": True}, NEIGHBOUR)
        (second,) = asked(server, request)
        if "structured_outputs" in body and body.keys() & TAKING:
            assert (first.status, second.status) == (400, 400), body
            continue
        assert (first.status, second.status) == (200, 200), (body, first.error, second.error)
        assert first.error is None and first.done, body
        assert (first.text, first.finish) == (second.text, second.finish), body
        assert first.logprobs == second.logprobs, body
        assert neighbour.text == alone.text, body


def text(server: Served, **fields: Any) -> str:
    (answer,) = asked(
        server,
        {"prompt": "The mill", "max_tokens": 30, "temperature": 0, "ignore_eos": True} | fields,
    )
    assert answer.status == 200, answer.error
    return answer.text[0]


def test_a_word_that_may_not_come_does_not(server: Served) -> None:
    prompt = [8, 9, 10]
    words = text(server, prompt=prompt).split()
    often = max(words, key=words.count)
    assert words.count(often) > 1
    assert often not in text(server, prompt=prompt, bad_words=[often]).split()


def test_parameters_that_leave_no_token_are_refused(server: Served) -> None:
    body = {"prompt": "x", "allowed_token_ids": [70, 2], "stop_token_ids": [70], "min_tokens": 2}
    (answer,) = asked(server, body)
    assert answer.status == 400
    assert answer.error is not None
    assert answer.error["param"] == "allowed_token_ids"


def test_a_stop_string_can_be_part_of_the_text_and_waits_for_the_least_tokens(
    server: Served,
) -> None:
    plain = text(server)
    stop = plain[10:12]
    cut = text(server, stop=stop)
    assert text(server, stop=stop, include_stop_str_in_output=True) == cut + stop
    assert len(text(server, stop=plain[0], min_tokens=10)) > 1
    assert text(server, stop=plain[0]) == ""


def test_special_tokens_are_shown_where_they_are_asked_for(server: Served) -> None:
    end = {"logit_bias": {"2": 100}, "max_tokens": 3}
    assert text(server, **end) == ""
    assert text(server, **end, skip_special_tokens=False) == "<|im_end|>" * 3
    shown = {"ignore_eos": False, "include_stop_str_in_output": True}
    assert text(server, **end, **shown, skip_special_tokens=False) == "<|im_end|>"


def test_the_end_token_does_not_come_before_the_least_tokens(server: Served) -> None:
    def tokens(**fields: Any) -> int:
        body = {"prompt": "x", "max_tokens": 9, "temperature": 0, "logit_bias": {"2": 100}}
        (answer,) = asked(server, body | fields)
        assert answer.usage is not None
        return int(answer.usage["completion_tokens"])

    assert tokens() == 1
    assert tokens(min_tokens=6) == 7


def test_a_prompt_is_cut_to_its_last_tokens(server: Served) -> None:
    long, end = [7] * 3000 + [8, 9, 10], [8, 9, 10]
    (refused, cut, short) = asked(
        server,
        {"prompt": long, "max_tokens": 4},
        {"prompt": long, "max_tokens": 4, "temperature": 0, "truncate_prompt_tokens": 3},
        {"prompt": end, "max_tokens": 4, "temperature": 0},
    )
    assert refused.status == 400
    assert (cut.status, cut.text) == (200, short.text)
    assert cut.usage == short.usage
