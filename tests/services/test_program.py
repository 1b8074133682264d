"""What the program does before its command is known."""

from __future__ import annotations

import io
import subprocess
import sys
from types import ModuleType

import pytest

from penstock.services.program import INTERRUPTED, main, write_any_character

TELLS_A_NUMBER = """
import socket, sys
from penstock.services.program import hold_standard_streams
hold_standard_streams()
print("nobody reads this", flush=True)
print("nor this", file=sys.stderr, flush=True)
sys.exit(socket.socket().fileno())
"""

STARTS_A_CHILD = """
import subprocess, sys
from penstock.services.program import hold_standard_streams
hold_standard_streams()
sys.exit(subprocess.call(["sh", "-c", "exec 9>&0 9>&1 9>&2"]))
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_socket_never_gets_the_number_of_a_standard_stream_that_is_closed(closed: str) -> None:
    program = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, TELLS_A_NUMBER]
    assert subprocess.run(program, capture_output=True, check=False).returncode >= 3


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_children_have_the_standard_streams_that_were_opened(closed: str) -> None:
    program = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, STARTS_A_CHILD]
    assert subprocess.run(program, capture_output=True, check=False).returncode == 0


def test_a_terminal_without_unicode_is_written_to_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "latin-1", "surrogateescape"))
    write_any_character()
    print("[MODEL …] é", flush=True)
    assert written.getvalue() == b"[MODEL ?] \xe9\n"


def test_ctrl_c_while_modules_are_imported_ends_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Interrupted(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "penstock.services.cli", Interrupted("cli"))
    assert main() == INTERRUPTED
