"""A model folder that cannot be served is refused: quickly, by name, without a trace.

All cases run in this process through what the tokenizer and the worker load; a few, and all of
them in the slow run, through `penstock serve` as a user starts it. The slow run prints the table
of docs/troubleshooting.md with `-s`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from support.pipeline.bad_folders import BAD_MODEL, CASES, SINGLE, Case, make_bad, write_sound
from support.pipeline.served import leftovers, served

from penstock.protocol.model_info import BadModelFolder, read_model_info
from penstock.services.tokenizer.text_model import TextModel
from penstock.services.worker.model_weights import load_model

SECONDS = 30.0
"""A refusal takes at most this long on a machine with nothing else to do, however slow it is."""


def names(cases: list[Case]) -> list[str]:
    return [case.name.replace(" ", "_") for case in cases]


def check_message(case: Case, message: str) -> None:
    for part in case.says:
        assert part in message
    assert len(message) < 1500


def load_all(folder: Path) -> None:
    """What the processes of a server read of a folder, one after the other."""
    info = read_model_info(folder)
    TextModel.load(folder, info.vocab_size)
    load_model(info, torch.float32, torch.device("cpu"), lambda note: None)


@pytest.mark.parametrize("case", CASES, ids=names(CASES))
def test_every_process_names_what_is_wrong(case: Case, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    path = make_bad(case, tmp_path / "model", marker)
    with pytest.raises(BadModelFolder) as caught:
        load_all(path)
    check_message(case, str(caught.value))
    assert not marker.exists()


def refuse(case: Case, tmp_path: Path) -> tuple[str, float]:
    """Serve the folder; check how that ends. Returns (message, seconds)."""
    marker, runtime = tmp_path / "executed", tmp_path / "run"
    path = make_bad(case, tmp_path / "model", marker)
    runtime.mkdir(mode=0o700)
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.services", "serve", str(path), "--device", "cpu",
         "--port", "0", "--runtime-dir", str(runtime)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )  # fmt: skip
    _, errors = process.communicate(timeout=110)
    seconds = time.monotonic() - began
    assert process.returncode == BAD_MODEL, errors
    said = [line for line in errors.splitlines() if line.startswith("penstock: ")]
    assert 1 <= len(said) <= 3, errors
    check_message(case, said[-1])
    assert "Traceback" not in errors
    assert seconds < SECONDS * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    assert leftovers(runtime) == []
    assert of_session(process.pid) == []
    assert not marker.exists()
    return said[-1].removeprefix("penstock: "), seconds


def of_session(leader: int) -> list[psutil.Process]:
    """Processes that live on in the session of a process that has ended."""
    found = []
    for pid in psutil.pids():
        try:
            if os.getsid(pid) == leader:
                found.append(psutil.Process(pid))
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


QUICK = [case for case in CASES if case.quick]


@pytest.mark.parametrize("case", QUICK, ids=names(QUICK))
def test_a_server_refuses_it_and_leaves_nothing(case: Case, tmp_path: Path) -> None:
    refuse(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=names(CASES))
def test_a_server_refuses_each_of_them(case: Case, tmp_path: Path) -> None:
    message, seconds = refuse(case, tmp_path)
    message = message.replace(str(tmp_path / "model"), "MODEL").replace("|", "\\|")
    print(f"\n| {case.name} | {BAD_MODEL} | {message} | {seconds:.1f} |")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_files_that_may_not_be_read_are_named(tmp_path: Path) -> None:
    folder = write_sound(tmp_path / "model", 1, tmp_path / "executed")
    for name in ("tokenizer.json", SINGLE, "config.json"):
        (folder / name).chmod(0)
        with pytest.raises(BadModelFolder, match=rf"{name}: Permission denied"):
            load_all(folder)
        (folder / name).chmod(0o600)


def test_the_corpus_is_made_from_a_folder_that_is_read_without_running_its_code(
    tmp_path: Path,
) -> None:
    marker = tmp_path / "executed"
    load_all(write_sound(tmp_path / "model", 2, marker))
    assert not marker.exists()


@pytest.mark.slow
def test_the_corpus_is_made_from_a_folder_that_is_served_without_running_its_code(
    tmp_path: Path,
) -> None:
    marker = tmp_path / "executed"
    folder = write_sound(tmp_path / "model", 2, marker)
    with served(str(folder), "--device", "cpu") as server:
        server.find("(of weights in)")
        server.find("(memory  KV memory)")  # may come after the line that says it serves
    assert not marker.exists()
