"""Settings that are longer than one string may be that a process is started with."""

from __future__ import annotations

import sys
import time

from penstock.services.launcher.environment import LONGEST_BYTES, without_long_values
from penstock.services.launcher.processes import Child

_COUNT_ADAPTERS = """
import os
from penstock.protocol.config.resolve import resolve
for _ in range(2):
    print(len(resolve(("loading",), {}, os.environ)[0].loading.lora), flush=True)
"""


def adapters(count: int) -> str:
    """``PENSTOCK_LORA`` with so many."""
    folder = "/adapters/" + "of a long folder " * 10
    return ",".join(f"sql-{number}={folder}/{number}" for number in range(count))


def test_what_is_too_long_stands_in_a_file_and_is_read_as_it_was() -> None:
    shown = {"PENSTOCK_LORA": adapters(1024), "PENSTOCK_MAX_REGISTERED_LORAS": "1024", "A": "b"}
    short, text = without_long_values(shown)
    assert short == {"PENSTOCK_MAX_REGISTERED_LORAS": "1024", "A": "b"}
    assert text.startswith('lora = "sql-0=') and len(text) > LONGEST_BYTES


def test_a_value_of_just_the_length_that_linux_takes_stays_in_the_environment() -> None:
    most = LONGEST_BYTES - len("PENSTOCK_LORA=") - 1
    for length, kept in ((most, True), (most + 1, False)):
        short, _ = without_long_values({"PENSTOCK_LORA": "a" * length})
        assert ("PENSTOCK_LORA" in short) is kept


def test_a_process_starts_with_more_adapters_than_one_string_holds() -> None:
    child = Child("worker", 0, {"PENSTOCK_MAX_REGISTERED_LORAS": "1024"})
    child._arguments = [sys.executable, "-c", _COUNT_ADAPTERS]
    child.change_environment("PENSTOCK_LORA", adapters(1024))
    child.start(time.monotonic())
    assert child._process is not None and child._process.wait(timeout=60) == 0
    assert child.reap(time.monotonic()) == 0
    assert child.last_words() == "1024"
