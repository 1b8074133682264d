"""A command without a terminal: in this process, or as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

from support.pipeline.in_process import called


def environment(**more: str) -> dict[str, str]:
    """That of this process without what would choose a server, a key or a hub."""
    apart = ("PENSTOCK_", "OPENAI_", "HF_")
    return {name: value for name, value in os.environ.items() if not name.startswith(apart)} | more


def call(*arguments: str, given: str = "", **more: str) -> subprocess.CompletedProcess[str]:
    """Call ``penstock`` in this process with ``given`` on its standard input."""
    return called(*arguments, given=given, environment=environment(**more))


def run(
    *arguments: str, given: str = "", timeout: float = 60.0, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run ``penstock`` as a process with ``given`` on its standard input."""
    return subprocess.run(
        [sys.executable, "-m", "penstock.services", *arguments],
        input=given,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(**more),
    )
