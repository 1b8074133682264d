"""Prompts that end with the last message, open, so that the answer continues it.

No template knows how to leave a message open. So a text that nobody can type is put behind the
message's own, and the prompt ends where the template printed it. The rules are those of
transformers' ``continue_final_message``, so that equal messages give equal prompts.
"""

from __future__ import annotations

import secrets
from typing import Any

from penstock.services.tokenizer.prompt_error import PromptError

VARIABLE = "continue_final_message"
"""The variable of a request that asks for this; no template gets it."""


class OpenMessage:
    """The last message of a chat, to be continued."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        """Raises ``PromptError``."""
        content = messages[-1].get("content", "")
        if not isinstance(content, str):
            raise PromptError(f"{VARIABLE}: the last message has no text to continue", "messages")
        self._content = content.strip()
        self._mark = f"\U000f0002{secrets.token_hex(8)}"
        # A template that trims the message takes the blank as well, which tells it from one that
        # keeps all.
        marked = {**messages[-1], "content": f"{content}{self._mark} "}
        self.messages = [*messages[:-1], marked]
        """For the template."""

    def end(self, rendered: str) -> int:
        """Where the prompt ends in the rendered ``messages``. Raises ``PromptError``."""
        end = rendered.rfind(self._mark)
        if end < 0:
            raise PromptError(
                f"{VARIABLE}: this model's chat template leaves out the last message, so there is "
                "nothing to continue",
                VARIABLE,
            )
        if rendered.startswith(f"{self._mark} ", end):
            return end
        return len(rendered[:end].rstrip())

    def check(self, prompt: str) -> None:
        """Raise ``PromptError`` for a prompt that does not end with the message's text."""
        if not prompt.rstrip().endswith(self._content):
            raise PromptError(
                f"{VARIABLE}: this model's chat template changes the text of the last message (it "
                "may leave out a closed <think> block), so it cannot be continued as it stands",
                VARIABLE,
            )
