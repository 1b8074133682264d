"""The turns of a conversation: a line, what it asks for, an answer."""

from __future__ import annotations

from collections.abc import Callable

from penstock.services.commands.api_client import ApiClient
from penstock.services.commands.chat.asking import ask
from penstock.services.commands.chat.conversation import Conversation
from penstock.services.commands.chat.line_input import LineInput
from penstock.services.commands.chat.slash_commands import Next, SlashCommands
from penstock.services.commands.chat.views import View
from penstock.services.commands.failure import FAILED, CommandError
from penstock.services.commands.printable import one_line

PROMPT = "> "


class Chat:
    """One conversation. An error is told, and the next line read."""

    def __init__(
        self,
        conversation: Conversation,
        client: ApiClient,
        view: View,
        tell: Callable[[str], None],
        complain: Callable[[str], None],
    ) -> None:
        """``tell``: what commands answer; ``complain``: what went wrong."""
        self.conversation = conversation
        self._client = client
        self._view = view
        self._complain = complain
        self.commands = SlashCommands(conversation, client, tell)
        self.failed = False
        """A line could not be done."""

    def run(self, lines: LineInput) -> int:
        """Until the lines end. Returns the exit code. Raises ``KeyboardInterrupt``."""
        while True:
            try:
                line = lines.read(self._prompt())
            except EOFError:
                return FAILED if self.failed else 0
            try:
                if self.take(line) is Next.END:
                    return FAILED if self.failed else 0
            except CommandError as error:
                self.failed = True
                self._complain(str(error))

    def _prompt(self) -> str:
        waiting = self.conversation.waiting_calls()
        if waiting:
            return f"result of {one_line(waiting[0]['function']['name'])}> "
        return PROMPT

    def take(self, line: str) -> Next:
        """One line, to the end of its answer. Raises ``CommandError``."""
        if line.startswith("/") and not line.startswith("//"):
            following = self.commands.run(line)
        elif not line.strip() and not self.conversation.waiting_calls():
            return Next.LINE
        else:
            self.conversation.say(line.removeprefix("/"))
            following = Next.LINE if self.conversation.waiting_calls() else Next.ANSWER
        if following is Next.ANSWER:
            self._answer()
        return following

    def _answer(self) -> None:
        """Raises ``CommandError``; the question is then taken back, and ``/retry`` knows it."""
        asked = self.conversation.messages[-1]["content"]
        try:
            answer = ask(self._client, self.conversation.body(), self._view, str(asked))
        except CommandError:
            self.commands.last_question = self.conversation.take_back()
            raise
        if answer.interrupted and answer.empty:
            self.commands.last_question = self.conversation.take_back()
        else:
            self.conversation.hear(answer)
            self.commands.last_question = None
