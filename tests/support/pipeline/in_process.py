"""``penstock`` called in the test's own process, where nothing depends on a process of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Mapping
from unittest import mock

from penstock.services.cli import main


def called(
    *arguments: str, given: str = "", environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """What a process with these arguments, this standard input and this environment would give.

    It costs no start of Python and no imports. An exception that would be a traceback is raised.
    """
    with contextlib.ExitStack() as stack:
        stdin, stdout, stderr = (
            stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8")) for _ in range(3)
        )
        stdin.write(given)
        stdin.seek(0)
        if environment is not None:
            stack.enter_context(mock.patch.dict(os.environ, environment, clear=True))
        stack.enter_context(mock.patch("sys.stdin", stdin))
        stack.enter_context(contextlib.redirect_stdout(stdout))
        stack.enter_context(contextlib.redirect_stderr(stderr))
        code = main(list(arguments))
        for file in (stdout, stderr):
            file.seek(0)
        return subprocess.CompletedProcess(arguments, code, stdout.read(), stderr.read())
