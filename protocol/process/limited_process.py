"""A process that is asked something which may hang, as a driver may."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from typing import NamedTuple

END_S = 5.0
"""For a process that was killed; one that waits in a driver may not end at all."""


class LimitedAnswer(NamedTuple):
    output: str
    """What it has written, also where it did not end."""
    in_time: bool
    ending: str
    """How it ended, as the reason for what is missing in the output."""


def answer_within(
    command: Sequence[str], limit_s: float, environment: Mapping[str, str] | None = None
) -> LimitedAnswer:
    """Run it for ``limit_s`` seconds at most; it is killed then, and left behind where even that
    does not end it."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=None if environment is None else dict(environment),
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired as expired:
        ending = f"it took longer than {limit_s:g} s" + _killed(process)
        return LimitedAnswer(_text(expired.output), False, ending)
    said = _text(errors).strip().splitlines()
    ending = said[-1] if said and process.returncode else f"it ended with {process.returncode}"
    return LimitedAnswer(_text(output), True, ending)


def _text(output: bytes | None) -> str:
    return (output or b"").decode("utf-8", "replace")


def _killed(process: subprocess.Popen[bytes]) -> str:
    """What is to be said of a process that had to be killed."""
    process.kill()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        return f", and process {process.pid} cannot be ended: it waits in the driver"
    return ""
