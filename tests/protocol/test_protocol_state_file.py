"""The file in which a process says how it is, for probes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.polling import until
from support.protocol.forks import Forks
from support.protocol.mailbox_process import short_folder
from support.protocol.tiny_services import started

from penstock.protocol.process.state_file import TOUCH_SECONDS, StateFile
from penstock.protocol.wire.addresses import AddressError


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    found = Forks("support.protocol.tiny_services", "penstock.services.router.service")
    yield found
    found.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


def says(path: Path, phase: str) -> bool:
    try:
        return path.read_text() == f"{phase}\n"
    except FileNotFoundError:
        return False


def age(path: Path) -> float:
    return time.time() - path.stat().st_mtime


@pytest.mark.parametrize("kind", ["router", "async", "loop"])
def test_a_process_keeps_its_phase_in_the_file_from_start_to_end(
    forks: Forks, folder: Path, kind: str
) -> None:
    path = folder / "state"
    start_s = 0.0 if kind == "router" else 1.0
    address = f"ipc://{folder}/router.sock"
    with started(forks, kind, address, state_file=str(path), start_s=start_s, busy=True) as one:
        if start_s:
            until(lambda: says(path, "starting"))
        until(lambda: says(path, "ready"))
        until(lambda: age(path) > 0.5)
        until(lambda: age(path) < 0.1)  # it is touched while nothing happens
        os.kill(one.pid, signal.SIGTERM)
        if kind != "router":  # it is busy until a second signal
            until(lambda: says(path, "draining"))
            os.kill(one.pid, signal.SIGTERM)
        one.ended(10.0)
        assert list(folder.glob("*state*")) == []


def test_the_file_of_a_process_that_is_stopped_grows_old(forks: Forks, folder: Path) -> None:
    path = folder / "state"
    address = f"ipc://{folder}/router.sock"
    with started(forks, "router", address, state_file=str(path)) as one:
        until(lambda: says(path, "ready"))
        os.kill(one.pid, signal.SIGSTOP)
        until(lambda: age(path) > 2 * TOUCH_SECONDS)
        os.kill(one.pid, signal.SIGCONT)
        until(lambda: age(path) < TOUCH_SECONDS)


def test_a_phase_is_written_at_once_and_the_same_one_once_a_second(tmp_path: Path) -> None:
    path = tmp_path / "state"
    file = StateFile(str(path), "starting")
    file.tell("ready", 100.0)
    assert says(path, "ready")
    path.unlink()
    file.tell("ready", 100.0 + TOUCH_SECONDS / 2)
    assert not path.exists()
    file.tell("ready", 100.0 + TOUCH_SECONDS)
    assert says(path, "ready")


def test_a_file_that_cannot_be_made_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "state"
    with pytest.raises(AddressError, match=f"--state-file {path}: No such file"):
        StateFile(str(path), "starting")


def test_a_folder_that_goes_away_later_ends_nobody(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    file = StateFile(str(folder / "state"), "starting")
    (folder / "state").unlink()
    folder.rmdir()
    file.tell("ready", 100.0)
    file.remove()


def test_without_a_path_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = StateFile("", "starting")
    file.tell("ready", 100.0)
    file.remove()
    assert list(tmp_path.iterdir()) == []
