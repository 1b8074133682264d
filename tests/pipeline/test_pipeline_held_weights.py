"""Weights that outlive their workers, in a running server: same text, and nothing is read again."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.chaos.victims import children, find, whole_again
from support.pipeline.opened_files import Opened
from support.pipeline.served import SMALL, Served, added_key, served
from support.polling import until
from test_pipeline_load_models import Setup

from penstock.loadtest.models.make_model import make_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LENGTH = 200


def ask(server: Served, **more: Any) -> str:
    """The text of a stream, whatever happens meanwhile."""
    return "".join(stream(server, **more))


def stream(server: Served, **more: Any) -> Iterator[str]:
    body = {"model": "model", "prompt": [5, 6, 7], "max_tokens": LENGTH, "temperature": 0}
    request = urllib.request.Request(
        server.url + "/v1/completions",
        json.dumps({**body, "ignore_eos": True, "stream": True, **more}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=180) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                yield event["choices"][0]["text"]


def killed_in_mid_stream(server: Served, number: int = 0) -> tuple[str, float]:
    """The text of a stream during which the worker is killed, and the longest pause in it."""
    texts, longest, last = [], 0.0, time.monotonic()
    for text in stream(server):
        texts.append(text)
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
        if len(texts) == 20:
            find(server, "worker", number).kill()
    return "".join(texts), longest


def mapped(server: Served) -> int:
    return len(re.findall(r'"event": "[^"(]* of held weights mapped', server.output))


def held_memory(pid: int) -> dict[int, int]:
    """Bytes of the weights' files that a process has open, by their inodes."""
    found = {}
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(descriptor).startswith("/memfd:penstock-weights"):
                file = descriptor.stat()
                assert file.st_mode & 0o777 == 0o600
                found[file.st_ino] = file.st_size
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("held") / "model"
    return make_model(place, seed=1, max_position_embeddings=2048)


@pytest.fixture
def weights(folder: Path) -> Iterator[Opened]:
    opened = Opened(folder / "model.safetensors")
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def text(folder: Path) -> str:
    """What a server without any of it answers."""
    with served(str(folder), *SMALL) as plain:
        return ask(plain)


def test_a_workers_successor_maps_what_it_left_and_reads_nothing(
    folder: Path, text: str, weights: Opened
) -> None:
    with served(str(folder), *SMALL, "--hold-weights") as server:
        assert weights.count > 0 and ask(server) == text
        before, count = weights.count, len(children(server))
        holder = find(server, "holder", 0)
        held = held_memory(holder.pid)
        assert len(held) == 1 and held == held_memory(find(server, "worker").pid)
        for times in (1, 2):
            began, victim = time.monotonic(), find(server, "worker")
            found, _ = killed_in_mid_stream(server)
            assert found == text
            whole_again(server, [victim], count, began)
            assert (weights.count, mapped(server)) == (before, times)
            assert held_memory(holder.pid) == held
        assert server.metrics()["penstock_held_weights_bytes"] == sum(held.values())
        # The holder dies: the worker goes on, and the next holder gets the same memory.
        holder.kill()
        assert ask(server) == text
        whole_again(server, [holder], count, time.monotonic())
        successor = find(server, "holder", 0)
        until(lambda: held_memory(successor.pid) == held, 90)
        assert killed_in_mid_stream(server)[0] == text
        assert (weights.count, mapped(server)) == (before, 3)


def test_without_a_holder_and_with_other_files_the_model_is_read(
    folder: Path, text: str, weights: Opened
) -> None:
    with served(str(folder), *SMALL, "--hold-weights") as server:
        before, count = weights.count, len(children(server))
        victims = [find(server, role) for role in ("holder", "worker")]
        for victim in victims:
            victim.kill()
        assert ask(server) == text
        whole_again(server, victims, count, time.monotonic())
        assert weights.count > before and mapped(server) == 0
        until(lambda: held_memory(find(server, "holder").pid), 90)
        before = weights.count
        os.utime(folder / "model.safetensors")
        assert killed_in_mid_stream(server)[0] == text
        assert weights.count > before and mapped(server) == 0
        before = weights.count
        assert killed_in_mid_stream(server)[0] == text
        assert (weights.count, mapped(server)) == (before, 1)


def test_two_engines_map_the_same_weights(folder: Path, text: str) -> None:
    flags = ("--hold-weights", "--data-parallel-size", "2")
    with served(str(folder), *SMALL, *flags) as server:
        assert mapped(server) == 1, "one has loaded them"
        files = held_memory(find(server, "holder").pid)
        for number in (0, 1):
            assert held_memory(find(server, "worker", number).pid) == files
        assert ask(server) == text
        find(server, "worker", 0).kill()
        find(server, "worker", 1).kill()
        assert ask(server) == text
        until(lambda: mapped(server) == 3, 90)


def test_quantized_weights_are_mapped_in_codes(folder: Path, weights: Opened) -> None:
    flags = (*SMALL, "--quantization", "int8", "--hold-weights")
    with served(str(folder), *flags) as server:
        text, before = ask(server), weights.count
        assert killed_in_mid_stream(server)[0] == text
        assert (weights.count, mapped(server)) == (before, 1)


def test_a_prepared_process_takes_a_workers_place(folder: Path, text: str) -> None:
    flags = ("--hold-weights", "--prepare-engines")
    with served(str(folder), *SMALL, *flags) as server:

        def prepared() -> list[psutil.Process]:
            found = server.processes().values()
            return [each for each in found if "prepared worker" in " ".join(each.cmdline())]

        for times in (1, 2):
            until(prepared, 90)
            (spare,), victim = prepared(), find(server, "worker")
            assert killed_in_mid_stream(server)[0] == text
            assert find(server, "worker").pid == spare.pid
            assert not victim.is_running()
            assert mapped(server) == times
        until(prepared, 90)
        prepared()[0].kill()
        until(prepared, 90)
        assert ask(server) == text


def test_a_model_that_falls_asleep_gives_its_weights_back(tmp_path: Path) -> None:
    names = [str(make_model(tmp_path / name, seed=at)) for at, name in enumerate("ab")]
    key = added_key(tmp_path / "keys", "root", "admin")
    flags = ("--hold-weights", "--prepare-engines", "--resident", "1", "--min-awake-s", "1")
    keys = ("--keys-file", str(tmp_path / "keys"))
    with served(*names, *SMALL, *flags, *keys) as server:
        setup = Setup(server, tmp_path, key, key)
        holder = find(server, "holder", 0).pid
        assert len(held_memory(holder)) == 1
        for name in "baba":
            status, answer = setup.complete(name)
            assert status == 200, answer
            until(lambda: len(held_memory(holder)) == 1, 90)
        assert mapped(server) == 0
        find(server, "worker", 0).kill()
        assert setup.complete("a")[0] == 200
        assert mapped(server) == 1
