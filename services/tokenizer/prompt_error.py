"""The error that a client's prompt or parameters cause."""

from __future__ import annotations


class PromptError(ValueError):
    """A request that cannot become tokens; the client gets it as a 400.

    ``param`` names the request field at fault (OpenAI's ``error.param``) or is ``None``.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
