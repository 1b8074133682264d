"""Logprobs over HTTP: exact in value, bytes and place, streamed and not, cold and cached."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import numpy.typing as npt
import pytest
import torch
from support.pipeline.clients import Answer, ask
from support.pipeline.served import SMALL, Served, SharedServers
from transformers import AutoModelForCausalLM

import penstock

TOLERANCE = 1e-4
PROMPT = "Über den Fluß: 水車 🛞 turns"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def folder(small_model: Path) -> Path:
    return small_model


@pytest.fixture(scope="module")
def server(folder: Path, shared_server: SharedServers) -> Served:
    return shared_server(str(folder), *SMALL)


@pytest.fixture(scope="module")
def library(folder: Path) -> Iterator[penstock.LLM]:
    with penstock.LLM(str(folder), dtype="float32", threads=1) as llm:
        yield llm


def asked(server: Served, *bodies: dict[str, Any], path: str = COMPLETIONS) -> list[Answer]:
    async def run() -> list[Answer]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
            return [await ask(session, server.url, body, path) for body in bodies]

    answers = asyncio.run(run())
    assert [answer.status for answer in answers] == [200] * len(bodies), answers[0].error
    return answers


def by_transformers(folder: Path, ids: list[int]) -> npt.NDArray[np.float64]:
    """[positions, V]: log-probabilities after each token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0].double()
    found: npt.NDArray[np.float64] = logits.log_softmax(-1).numpy()
    return found


def generated(llm: penstock.LLM) -> penstock.RequestOutput:
    """Prompt and answer, with 2 and 3 likeliest tokens at each place."""
    settings = penstock.SamplingParams(
        temperature=0.8, seed=4, max_tokens=12, logprobs=3, prompt_logprobs=2, ignore_eos=True
    )
    (result,) = llm.generate([PROMPT], settings)
    return result


def check_places(result: penstock.RequestOutput, plain: npt.NDArray[np.float64]) -> None:
    """plain: [positions, V], log-probabilities after each token of prompt and answer."""
    ids = [*result.prompt_token_ids, *result.outputs[0].token_ids]
    length = len(result.prompt_token_ids)
    places = [*(result.prompt_logprobs or []), *(result.outputs[0].logprobs or [])]
    assert len(places) == len(ids) and places[0] is None
    for position, place in enumerate(places[1:], 1):
        assert place is not None
        row = plain[position - 1]
        listed = 3 if position >= length else 2
        assert len(place) in (listed, listed + 1) and ids[position] in place
        for token, found in place.items():
            assert abs(found.logprob - row[token]) < TOLERANCE
        ranks = sorted(found.rank for found in place.values())
        assert ranks[:listed] == list(range(1, listed + 1))


@pytest.mark.slow  # the next test does the same with a smaller model
def test_the_built_in_model_has_the_logprobs_of_transformers() -> None:
    folder = Path(__file__).parent.parent.parent / "demo" / "model"
    with penstock.LLM(str(folder), dtype="float32", threads=1) as llm:
        result = generated(llm)
    check_places(
        result,
        by_transformers(folder, [*result.prompt_token_ids, *result.outputs[0].token_ids]),
    )


def test_prompt_and_answer_have_the_logprobs_of_transformers(
    server: Served, folder: Path, library: penstock.LLM
) -> None:
    result = generated(library)
    ids = [*result.prompt_token_ids, *result.outputs[0].token_ids]
    plain = by_transformers(folder, ids)
    check_places(result, plain)
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0.8, "seed": 4, "ignore_eos": True}
    (answer,) = asked(server, body | {"logprobs": 3, "echo": True})
    columns = answer.logprobs[0]
    assert columns["token_logprobs"][0] is None
    expected = [plain[position - 1, ids[position]] for position in range(1, len(ids))]
    assert np.abs(np.array(columns["token_logprobs"][1:]) - expected).max() < TOLERANCE
    assert columns["top_logprobs"][0] is None
    assert all(len(top) in (3, 4) for top in columns["top_logprobs"][1:])


def test_offsets_say_where_in_the_text_each_token_begins(server: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 1.5, "seed": 2, "ignore_eos": True}
    (answer,) = asked(server, body | {"logprobs": 0, "echo": True})
    columns, text = answer.logprobs[0], answer.text[0]
    assert text.startswith(PROMPT)
    assert "top_logprobs" not in columns
    offsets = columns["text_offset"]
    assert offsets[0] == 0 and all(a <= b for a, b in pairwise(offsets))
    for token, begin, end in zip(
        columns["tokens"], offsets, [*offsets[1:], len(text)], strict=True
    ):
        whole = not token.startswith("bytes:") and "\ufffd" not in text[begin:end]
        if whole and end > begin:
            assert text[begin:end] == token


def test_the_bytes_of_a_chats_tokens_are_those_of_its_text(server: Served) -> None:
    body = {
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 60,
        "temperature": 1.5,
        "seed": 8,
        "logprobs": True,
        "top_logprobs": 2,
        "logit_bias": {"2": -100},
    }
    whole, streamed = asked(server, body, body | {"stream": True}, path=CHAT)
    content = whole.logprobs[0]["content"]
    assert whole.usage is not None
    assert len(content) == whole.usage["completion_tokens"]
    joined = b"".join(bytes(token["bytes"]) for token in content)
    assert joined.decode("utf-8", "replace") == whole.text[0]
    for token in content:
        assert bytes(token["bytes"]).decode("utf-8", "replace") == token["token"]
        assert len(token["top_logprobs"]) == 2
        first, second = token["top_logprobs"]
        assert first["logprob"] >= second["logprob"] >= -9999
    assert streamed.logprobs == whole.logprobs
    assert streamed.text == whole.text


def test_a_cached_prefix_changes_no_prompt_logprob(server: Served) -> None:
    prompt = [*range(10, 250)]
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "prompt_logprobs": 1}
    (cold,) = asked(server, body | {"cache_salt": "cold"})
    plain, warm, after = asked(
        server, {"prompt": prompt, "max_tokens": 2, "temperature": 0}, body, {"prompt": prompt}
    )
    assert len(cold.prompt_logprobs[0]) == len(prompt)
    assert warm.prompt_logprobs == cold.prompt_logprobs
    assert plain.text == warm.text == cold.text
    assert after.usage is not None
    assert after.usage["prompt_tokens_details"]["cached_tokens"] >= 200


def test_tokens_of_a_stop_string_have_logprobs_and_later_ones_do_not(server: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0, "logprobs": 1, "n": 2}
    (plain,) = asked(server, body | {"ignore_eos": True})
    stop = plain.text[0][6:8]
    (cut,) = asked(server, body | {"stop": stop})
    assert cut.usage is not None
    assert cut.text[0] == plain.text[0][: plain.text[0].index(stop)]
    lengths = {choice: len(columns["tokens"]) for choice, columns in cut.logprobs.items()}
    assert sum(lengths.values()) == cut.usage["completion_tokens"]
    for choice, columns in cut.logprobs.items():
        assert columns["tokens"] == plain.logprobs[choice]["tokens"][: lengths[choice]]


def test_a_prompt_is_scored_without_an_answer(
    server: Served, folder: Path, library: penstock.LLM
) -> None:
    scored = {"prompt": [PROMPT, "two"], "max_tokens": 0, "echo": True, "logprobs": 2}
    body = scored | {"max_tokens": 1, "n": 2, "temperature": 0}
    whole, streamed, longer = asked(server, scored | {"n": 2}, scored | {"stream": True}, body)
    assert whole.text == {0: PROMPT, 1: PROMPT, 2: "two", 3: "two"}
    assert streamed.text == {0: PROMPT, 1: "two"}
    assert set(whole.finish.values()) == {"length"} == set(streamed.finish.values())
    assert whole.usage is not None and longer.usage is not None
    assert whole.usage["completion_tokens"] == 0
    assert whole.usage["prompt_tokens"] == longer.usage["prompt_tokens"]
    for choice, columns in whole.logprobs.items():
        for name, column in columns.items():
            assert column == longer.logprobs[choice][name][:-1], name
    assert streamed.logprobs == {0: whole.logprobs[0], 1: whole.logprobs[2]}
    (chat,) = asked(
        server,
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 0, "prompt_logprobs": 0},
        path=CHAT,
    )
    assert (chat.text, chat.finish) == ({0: ""}, {0: "length"})
    settings = penstock.SamplingParams(max_tokens=0, prompt_logprobs=2)
    (result,) = library.generate([PROMPT], settings)
    with pytest.raises(ValueError, match=r"max_tokens is 0.* echo or prompt_logprobs"):
        library.generate([PROMPT], penstock.SamplingParams(max_tokens=0))
    assert result.outputs[0].token_ids == [] and result.outputs[0].text == ""
    check_places(result, by_transformers(folder, result.prompt_token_ids))


def test_an_echo_is_the_prompt_before_the_answer(server: Served) -> None:
    body = {"prompt": [PROMPT, "two"], "max_tokens": 5, "temperature": 0, "n": 2}
    plain, echoed = asked(server, body, body | {"echo": True})
    (streamed,) = asked(server, body | {"echo": True, "stream": True})
    prompts = [PROMPT, PROMPT, "two", "two"]
    assert echoed.text == {n: prompts[n] + plain.text[n] for n in range(4)}
    assert streamed.text == echoed.text
    assert echoed.usage == plain.usage


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [5] * 1900, "prompt_logprobs": 20, "n": 1}, None),
        ({"prompt": [5] * 1900, "logprobs": 1, "echo": True, "stream": True}, "echo"),
        ({"prompt": [5] * 1900, "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt": [5] * 1900, "prompt_logprobs": 20, "n": 4}, "prompt_logprobs"),
        ({"prompt": [[5] * 1900] * 4, "prompt_logprobs": 20}, "prompt_logprobs"),
        ({"prompt": [5] * 1900, "echo": True, "stream": True, "n": 5}, "echo"),
    ],
)
def test_what_comes_of_a_prompt_has_a_limit(
    server: Served, body: dict[str, Any], param: str | None
) -> None:
    async def run() -> Answer:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
            return await ask(session, server.url, {"max_tokens": 1, **body})

    answer = asyncio.run(run())
    if param is None:
        assert answer.status == 200, answer.error
        assert len(answer.prompt_logprobs[0]) == 1900
    else:
        assert answer.status == 400
        assert answer.error is not None and answer.error["param"] == param
