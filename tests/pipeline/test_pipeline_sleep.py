"""Models that sleep and wake in a running server: more of them than may be awake."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.chaos.victims import children, find, nothing_held
from support.pipeline.served import SMALL, added_key, served
from test_pipeline_load_models import Answer, Setup, Stream

from penstock.loadtest.models.make_model import make_model
from penstock.loadtest.models.model_sizes import SIZES

NULL = ("--device", "null", "--null-step-ms", "15")
WHOLE = 6
"""Router, frontend, two tokenizers, and an engine of two processes."""
SLOW = pytest.mark.slow


def models(place: Path, names: str) -> list[str]:
    return [
        str(make_model(place / name, seed=seed, max_position_embeddings=2048))
        for seed, name in enumerate(names)
    ]


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    """Two models, of which one is awake."""
    place = tmp_path_factory.mktemp("sleep")
    ann, root = added_key(place / "keys", "ann"), added_key(place / "keys", "root", "admin")
    flags = ("--resident", "1", "--keys-file", str(place / "keys"), "--drain-timeout-s", "60")
    with served(*models(place, "ab"), *NULL, *flags) as server:
        yield Setup(server, place, ann, root)


def states(setup: Setup) -> dict[str, str]:
    """As clients are told."""
    listed = setup.ask("GET", "/v1/models", key=setup.ann)[1]["data"]
    return {model["id"]: model.get("state", "ready") for model in listed}


def text_of(answer: Answer) -> str:
    status, body = answer
    assert status == 200, body
    found: str = body["choices"][0]["text"]
    return found


def test_a_request_wakes_its_model_when_what_runs_of_the_other_is_finished(setup: Setup) -> None:
    count = len(children(setup.server))
    assert states(setup) == {"a": "ready", "b": "asleep"}
    assert setup.ask("GET", "/ready")[1]["models"] == {"a": "ready", "b": "asleep"}
    stream = Stream(setup, "a", 120)
    answers: list[Answer] = []
    others = [
        threading.Thread(target=lambda: answers.append(setup.complete("b"))) for _ in range(3)
    ]
    for other in others:
        other.start()
    stream.end()
    for other in others:
        other.join()
    assert len({text_of(answer) for answer in answers}) == 1
    setup.until(lambda: states(setup) == {"a": "asleep", "b": "ready"}, "they change places")
    assert len(children(setup.server)) == count
    assert text_of(setup.complete("a"))
    assert setup.ask("GET", "/is_sleeping?model=b")[1] == {"is_sleeping": True, "state": "asleep"}


def test_administrators_put_models_to_sleep_and_wake_them(setup: Setup) -> None:
    status, told = setup.ask("POST", "/sleep", {"model": "a"})
    assert (status, told["state"]) == (200, "asleep")
    assert setup.ask("GET", "/ready")[0] == 200, "its next request would be served"
    assert setup.ask("POST", "/tokenize", {"model": "a", "prompt": "hi"})[0] == 200, (
        "needs no engine"
    )
    status, told = setup.ask("POST", "/wake_up", {"model": "a"})
    assert (status, told["state"]) == (200, "ready")
    assert setup.ask("POST", "/sleep", {"model": "nobody"})[0] == 404


@SLOW
@pytest.mark.timeout(1800)
def test_a_hundred_changes_at_random_fail_no_request(tmp_path: Path) -> None:
    """Of three models on the CPU two are awake; each answer is what it was the first time."""
    rng = random.Random(31)
    first: dict[str, str] = {}
    flags = ("--resident", "2", "--min-awake-s", "1")
    with served(*models(tmp_path, "abc"), *SMALL, *flags) as server:

        def ask(name: str, answers: list[tuple[str, Answer]]) -> None:
            body = {"model": name, "prompt": [5, 6, 7], "max_tokens": 8, "seed": 1}
            answers.append((name, server.post("/v1/completions", {**body, "ignore_eos": True})))

        while server.output.count("is awake after") < 100:
            answers: list[tuple[str, Answer]] = []
            asked = [rng.choice("abc") for _ in range(rng.randint(1, 4))]
            threads = [threading.Thread(target=ask, args=(name, answers)) for name in asked]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(answers) == len(asked)
            for name, answer in answers:
                text = text_of(answer)
                assert first.setdefault(name, text) == text
        assert set(first) == set("abc")
        assert len(set(first.values())) > 1, "they are not one model"
        nothing_held(server)


@SLOW
def test_a_stream_that_outlasts_the_drain_goes_on_when_its_model_is_awake_again(
    tmp_path: Path,
) -> None:
    flags = ("--resident", "1", "--drain-timeout-s", "1", "--min-awake-s", "1")
    root = added_key(tmp_path / "keys", "root", "admin")
    flags += ("--keys-file", str(tmp_path / "keys"))
    with served(*models(tmp_path, "ab"), *NULL, *flags) as server:
        setup = Setup(server, tmp_path, root, root)
        alone = text_of(setup.complete("a", 600))
        stream = Stream(setup, "a", 600)
        assert text_of(setup.complete("b"))
        stream.end()
        assert "".join(stream.texts) == alone
        assert server.output.count("falls asleep") >= 2


@SLOW
def test_engines_that_are_prepared_take_over_and_whoever_of_them_dies_is_not_missed(
    tmp_path: Path,
) -> None:
    root = added_key(tmp_path / "keys", "root", "admin")
    flags = ("--resident", "1", "--prepare-engines", "--keys-file", str(tmp_path / "keys"))
    with served(*models(tmp_path, "ab"), *NULL, *flags) as server:
        setup = Setup(server, tmp_path, root, root)
        setup.until(lambda: len(children(server)) == WHOLE + 2, "nothing is prepared")
        held = {find(server, role, 1).pid for role in ("prepared worker", "prepared scheduler")}
        assert text_of(setup.complete("b"))
        assert held < set(children(server)), "these are its engine"
        setup.until(lambda: len(children(server)) == WHOLE + 2, "nothing is prepared")
        for role in ("prepared worker", "prepared scheduler"):
            find(server, role, 0).kill()
        setup.until(lambda: len(children(server)) == WHOLE, "they come back before they are wanted")
        assert text_of(setup.complete("a"))
        setup.until(lambda: len(children(server)) == WHOLE + 2, "nothing is prepared")


@SLOW
def test_what_waits_for_a_model_that_sleeps_is_finished_before_the_server_ends(
    tmp_path: Path,
) -> None:
    with served(*models(tmp_path, "ab"), *NULL, "--resident", "1") as server:
        answers: list[Answer] = []
        body = {"model": "b", "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
        asking = threading.Thread(
            target=lambda: answers.append(server.post("/v1/completions", body))
        )
        asking.start()
        deadline = time.monotonic() + 60.0
        while not server.metrics().get("penstock_queue_depth") and not answers:
            assert time.monotonic() < deadline
        server.process.send_signal(signal.SIGINT)
        asking.join(60)
        assert text_of(answers[0])
        assert server.process.wait(60) == 0


def test_workers_that_stay_while_their_model_sleeps_go_on_with_what_they_have(
    tmp_path: Path,
) -> None:
    workers_stay(models(tmp_path, "ab"), *NULL)


@pytest.mark.gpu
@pytest.mark.skipif(not Path("/dev/nvidia0").exists(), reason="needs a CUDA device")
def test_weights_of_sleeping_models_wait_in_the_hosts_memory(tmp_path: Path) -> None:
    folders = [
        str(make_model(tmp_path / name, seed=seed, **SIZES["tiny"]))
        for seed, name in enumerate("ab")
    ]
    workers_stay(folders, "--device", "cuda", "--hold-weights", "--dtype", "float32")


def workers_stay(folders: list[str], *device: str) -> None:
    flags = ("--resident", "1", "--sleep-level", "1", "--min-awake-s", "0")
    with served(*folders, *device, *flags) as server:

        def text(name: str) -> str:
            body = {"model": name, "prompt": [5, 6, 7], "max_tokens": 4, "seed": 1}
            return text_of(server.post("/v1/completions", body))

        first = {name: text(name) for name in "ab"}
        workers = {name: find(server, "worker", at).pid for at, name in enumerate("ab")}
        for name in "aba":
            assert text(name) == first[name]
        again = {name: find(server, "worker", at).pid for at, name in enumerate("ab")}
        assert again == workers
        find(server, "worker", 1).kill()
        assert text("b") == first["b"], "one that has died meanwhile is started again"
        assert find(server, "worker", 1).pid != workers["b"]
        assert find(server, "worker", 0).pid == workers["a"]
