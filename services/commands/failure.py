"""How a command fails by no fault of its own."""

from __future__ import annotations

FAILED, WRONG_USE, UNREACHABLE = 1, 2, 4
"""Exit codes: the server refused or failed, wrong flags, nothing answers at the address."""


class CommandError(Exception):
    """What the user reads behind ``penstock:``, and the exit code."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code
