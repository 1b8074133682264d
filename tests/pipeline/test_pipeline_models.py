"""Two models behind one server: each answers for itself, and neither notices what befalls the
other; a third one joins while they serve, and leaves again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from support.chaos.streams import Crowd, Followed, requests, undisturbed
from support.chaos.victims import children, find, whole_again
from support.pipeline.reference_models import VOCABULARY, ids_of, transformers_choices, write_model
from support.pipeline.served import Served, served, start_service
from support.polling import until

ARCHITECTURES = {"alpha": "qwen3", "beta": "llama", "gamma": "gpt-neox"}
PROMPTS = [[5, 6, 7, 8], [300, 12, 44], [9] * 20]
FLAGS = ("--device", "cpu", "--dtype", "float32", "--threads", "1", "--max-num-seqs", "16")
STEP_SECONDS = 0.02


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("models")
    return {name: write_model(kind, place / name) for name, kind in ARCHITECTURES.items()}


@pytest.fixture(scope="module")
def server(folders: dict[str, Path]) -> Iterator[Served]:
    slow = ("--fault", f"worker:sleep={STEP_SECONDS}@step")
    both = (str(folders["alpha"]), str(folders["beta"]))
    with served(*both, *FLAGS, *slow, "--restart-wait-s", "60") as running:
        yield running


def client(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def answers_are_its_own(sdk: openai.OpenAI, folder: Path) -> None:
    """The model answers as transformers does with the same files."""
    outputs = []
    for prompt in PROMPTS:
        answer = sdk.completions.create(
            model=folder.name, prompt=prompt, max_tokens=12, temperature=0,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        assert answer.model == folder.name
        outputs.append(ids_of(answer.choices[0].text))
    assert transformers_choices(folder, PROMPTS, outputs) == outputs


def names(sdk: openai.OpenAI) -> list[str]:
    return [model.id for model in sdk.models.list()]


def ready(server: Served, model: str = "") -> tuple[int, dict[str, Any]]:
    path = f"/ready?model={model}" if model else "/ready"
    try:
        with urllib.request.urlopen(server.url + path, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_the_openai_sdk_finds_both_and_each_answers_for_itself(
    server: Served, folders: dict[str, Path]
) -> None:
    with client(server) as sdk:
        assert names(sdk) == ["alpha", "beta"]
        assert sdk.models.retrieve("beta").id == "beta"
        answers_are_its_own(sdk, folders["alpha"])
        answers_are_its_own(sdk, folders["beta"])
        with pytest.raises(openai.NotFoundError, match="served here: 'alpha', 'beta'"):
            sdk.completions.create(model="gamma", prompt="x")
    assert ready(server)[1]["models"] == {"alpha": "ready", "beta": "ready"}


def bodies_of(model: str, seed: int, max_tokens: int) -> list[dict[str, Any]]:
    asked = requests(
        4, seed=seed, prompt_tokens=12, max_tokens=max_tokens, vocabulary=VOCABULARY, streamed=True
    )
    return [{**body, "model": model} for body in asked]


def end_of_longest_pause(one: Followed, since: float) -> float:
    after = [t for t in one.arrivals if t > since]
    return max(zip([since, *after], after, strict=False), key=lambda pause: pause[1] - pause[0])[1]


@pytest.mark.parametrize(
    ("role", "number"), [("scheduler", 0), pytest.param("worker", 1, marks=pytest.mark.slow)]
)
def test_a_killed_engine_is_not_noticed_by_the_streams_of_the_other_model(
    server: Served, role: str, number: int
) -> None:
    struck, other = ("alpha", "beta") if number == 0 else ("beta", "alpha")
    theirs, others = bodies_of(struck, 1, 30), bodies_of(other, 2, 140)
    count = len(children(server))
    seen: dict[str, Any] = {}

    async def strike() -> tuple[list[Followed], list[Followed]]:
        async with Crowd(server.url, theirs) as one, Crowd(server.url, others) as two:
            await one.until(5)
            await two.until(5)
            victim = find(server, role, number)
            victim.kill()
            seen["victim"], seen["at"] = victim, time.monotonic()
            while (await asyncio.to_thread(ready, server, struck))[0] == 200:
                await asyncio.sleep(0.01)
            seen["other"] = await asyncio.to_thread(ready, server, other)
            seen["all"] = await asyncio.to_thread(ready, server)
            return await one.ends(), await two.ends()

    hit, spared = asyncio.run(strike())
    assert seen["other"][0] == 200
    assert (seen["all"][0], seen["all"][1]["models"][other]) == (503, "ready")
    assert seen["all"][1]["models"][struck] != "ready"
    whole_again(server, [seen["victim"]], count, seen["at"])
    # All of them had a pause. In it the other model's streams went on, whatever else is running
    # on this machine.
    resumed = min(end_of_longest_pause(one, seen["at"]) for one in hit)
    for one in spared:
        between = [t for t in one.arrivals if seen["at"] < t < resumed]
        assert len(between) >= 5, f"{len(between)} tokens in {resumed - seen['at']:.1f} s"
    expected = asyncio.run(undisturbed(server.url, theirs + others))
    assert [one.verdict() for one in hit + spared] == [one.verdict() for one in expected]


def test_a_third_model_joins_while_they_serve_and_leaves_again(
    server: Served, folders: dict[str, Path]
) -> None:
    folder = str(folders["gamma"])
    own = {"worker": FLAGS, "scheduler": FLAGS[6:], "tokenizer": ()}
    with contextlib.ExitStack() as stack, client(server) as sdk:
        joined = []
        for service, flags in own.items():
            engine = () if service == "tokenizer" else ("--engine", "third")
            process = start_service(server, service, *engine, *flags, folder)
            stack.callback(process.kill)
            joined.append(process)
        until(lambda: "gamma" in ready(server)[1]["models"], told="the third model is not ready")
        assert ready(server)[0] == 200
        assert names(sdk) == ["alpha", "beta", "gamma"]
        answers_are_its_own(sdk, folders["gamma"])
        answers_are_its_own(sdk, folders["alpha"])
        for process in joined:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(60) for process in joined] == [0, 0, 0]
        until(lambda: names(sdk) == ["alpha", "beta"], told="the third model is still there")
        assert ready(server)[0] == 200
        with pytest.raises(openai.NotFoundError):
            sdk.completions.create(model="gamma", prompt=[5], max_tokens=1)
