"""Where the program ``penstock`` begins, before anything large is imported."""

from __future__ import annotations

import io
import os
import sys

INTERRUPTED = 130
"""Exit code, as of a shell: 128 and SIGINT's number."""


def hold_standard_streams() -> None:
    """Open ``/dev/null`` in the place of standard streams that are closed (``penstock serve >&-``).

    Otherwise the next socket or file gets their numbers, and whoever writes to standard output,
    or inherits it, meets that.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            os.set_inheritable(number, True)  # else a child would have it closed again
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def write_any_character() -> None:
    """Let standard output write ``?`` for a character that the locale's encoding does not have, in
    place of a ``UnicodeEncodeError``. Standard error does so by itself."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.encoding.lower() != "utf-8":
        sys.stdout.reconfigure(errors="replace")


def main() -> int:
    """Run the command that the arguments name. Returns the exit code."""
    hold_standard_streams()
    write_any_character()
    try:
        from penstock.services.cli import main as run
    except KeyboardInterrupt:  # the imports take a second where the disk is cold
        return INTERRUPTED
    return run()
