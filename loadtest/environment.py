"""What has to be known about a run to repeat it."""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import penstock

SECRETS = ("--api-key", "--secret")
_HIDDEN = "***"


def redacted(arguments: Sequence[str]) -> str:
    """The command line without keys and secrets, and without the values of headers."""
    shown: list[str] = []
    flag = ""
    for argument in arguments:
        if argument.startswith("--"):
            flag, equals, _ = argument.partition("=")
            hide = bool(equals) and flag in (*SECRETS, "--header")
            shown.append(f"{flag}={_HIDDEN}" if hide else argument)
        elif flag in SECRETS:
            shown.append(_HIDDEN)
        elif flag == "--header":
            shown.append(f"{argument.partition('=')[0]}={_HIDDEN}")
        else:
            shown.append(argument)
    return shlex.join(shown)


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment(command: str, arguments: Sequence[str]) -> dict[str, Any]:
    return {
        "penstock": penstock.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "usable_cores": usable_cores(),
        "command": f"{command} {redacted(arguments)}".rstrip(),
    }


def date() -> str:
    """Local time as vLLM's tool writes it."""
    return datetime.now().strftime("%Y%m%d-%H%M%S")
