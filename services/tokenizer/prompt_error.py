"""The error that a client's prompt or parameters cause."""

from __future__ import annotations


class PromptError(ValueError):
    """A request that cannot become tokens; the client gets it as a 400.

    ``param`` names the request field at fault (OpenAI's ``error.param``) or is ``None``, and so
    does ``code`` (``error.code``) the cause. ``choice``: whose prompt is at fault, of a batch.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.choice = 0


def window_exceeded(message: str, param: str) -> PromptError:
    """The error of a prompt and an answer for which the model's window is too small.

    Agents shorten the conversation and ask again when they see this code. Many look at the words
    alone, for "prompt is too long" (Anthropic's) or "maximum context length" (OpenAI's).
    """
    return PromptError(message, param, "context_length_exceeded")
