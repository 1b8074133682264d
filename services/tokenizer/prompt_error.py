"""The error that a client's prompt or parameters cause."""

from __future__ import annotations

from penstock.protocol.wire.messages.requests import RequestHead

WINDOW_EXCEEDED = "context_length_exceeded"


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
    return PromptError(message, param, WINDOW_EXCEEDED)


def virtual_words(head: RequestHead) -> str:
    """What an error about the window says beside, where more stands in it than a client sees."""
    if not head.virtual_tokens:
        return ""
    return f"; beside them stand the {head.virtual_tokens} virtual tokens of the adapter"
