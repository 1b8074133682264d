"""What a line that begins with a slash does."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from penstock.protocol.suggestions import closest
from penstock.services.commands.api_client import ApiClient
from penstock.services.commands.chat.conversation import Conversation
from penstock.services.commands.failure import WRONG_USE, CommandError
from penstock.services.commands.printable import one_line, printable
from penstock.services.commands.server_answers import model_cards
from penstock.services.commands.settings import names, setting


class Next(enum.Enum):
    """What comes after a command."""

    LINE = enum.auto()
    """The user's next line."""
    ANSWER = enum.auto()
    """An answer to the conversation as it stands."""
    END = enum.auto()


class SlashCommand(msgspec.Struct, frozen=True):
    form: str
    summary: str


FORMS = {
    "help": SlashCommand("/help", "show these commands"),
    "system": SlashCommand("/system [TEXT]", 'show or set the system message; "" removes it'),
    "set": SlashCommand("/set [NAME VALUE]", "show or set a parameter, as /set temperature 0.2"),
    "unset": SlashCommand("/unset NAME", "leave a parameter to the server again"),
    "model": SlashCommand("/model [NAME]", "show the server's models, or go on with another"),
    "retry": SlashCommand("/retry", "ask the last question again"),
    "clear": SlashCommand("/clear", "forget what was said; system message and parameters stay"),
    "save": SlashCommand("/save [-f] FILE", "write the conversation as JSON; -f overwrites"),
    "load": SlashCommand("/load FILE", "go on from such a file"),
    "exit": SlashCommand("/exit", "leave, as Ctrl-D does"),
}
_KEYS = """Alt-Enter begins a new line. Ctrl-C interrupts an answer, and leaves at an empty line.
A message that begins with a slash is written with two."""


class SlashCommands:
    """Acts on one conversation. ``run`` raises ``CommandError`` for what it cannot do."""

    def __init__(
        self, conversation: Conversation, client: ApiClient, say: Callable[[str], None]
    ) -> None:
        self._conversation = conversation
        self._client = client
        self._say = say
        self.last_question: str | None = None
        """The last one that got no answer; ``/retry`` asks it."""

    def run(self, line: str) -> Next:
        """``line`` begins with a slash."""
        name, _, rest = line[1:].partition(" ")
        name = {"quit": "exit", "bye": "exit", "?": "help"}.get(name, name)
        if name not in FORMS:
            likely = closest(name, FORMS)
            advice = f"did you mean /{likely}?" if likely else "/help lists them"
            raise CommandError(f"there is no command /{one_line(name)}: {advice}", WRONG_USE)
        found: Next | None = getattr(self, f"_{name}")(rest.strip())
        return found or Next.LINE

    def words(self, begun: str) -> Iterator[str]:
        """Lines that ``begun`` may become."""
        lines: Iterable[str] = [f"/{name}" for name in FORMS]
        if begun.startswith("/set "):
            lines = [f"/set {name} " for name in names()]
        elif begun.startswith("/unset "):
            lines = [f"/unset {name}" for name in self._conversation.settings]
        if begun.startswith("/"):
            yield from (line for line in lines if line.startswith(begun))

    def _help(self, rest: str) -> None:
        width = max(len(one.form) for one in FORMS.values()) + 2
        self._say("\n".join(f"{one.form:{width}}{one.summary}" for one in FORMS.values()))
        self._say(_KEYS)

    def _system(self, rest: str) -> None:
        if rest:
            self._conversation.system = "" if rest in ('""', "''") else rest
            self._say("system message set" if self._conversation.system else "no system message")
        else:
            self._say(printable(self._conversation.system) or "no system message")

    def _set(self, rest: str) -> None:
        settings = self._conversation.settings
        if not rest:
            shown = [f"{name} = {_json(value)}" for name, value in settings.items()]
            self._say(printable("\n".join(shown)) or "no parameter is set")
            return
        name, _, text = rest.replace("=", " ", 1).partition(" ")
        if not text.strip():
            raise CommandError(f"/set {name} needs a value", WRONG_USE)
        name, value = setting(name, text.strip())
        settings[name] = value
        self._say(one_line(f"{name} = {_json(value)}"))

    def _unset(self, rest: str) -> None:
        if self._conversation.settings.pop(rest.replace("-", "_"), None) is None:
            raise CommandError(f"{one_line(rest) or 'the parameter'} is not set", WRONG_USE)
        self._say(f"{one_line(rest)} is the server's choice")

    def _model(self, rest: str) -> None:
        served = [card.id for card in model_cards(self._client)]
        if rest and rest not in served:
            raise CommandError(
                f"the server has no model {one_line(rest)}; it has {one_line(', '.join(served))}"
            )
        self._conversation.model = rest or self._conversation.model
        for name in served:
            mark = "*" if name == self._conversation.model else " "
            self._say(f"{mark} {one_line(name)}")

    def _retry(self, rest: str) -> Next:
        question = self.last_question
        if question is None:
            question = self._conversation.take_back()
        if question is None:
            raise CommandError("nothing was asked yet", WRONG_USE)
        self._conversation.say(question)
        return Next.ANSWER

    def _clear(self, rest: str) -> None:
        self._conversation.messages.clear()
        self.last_question = None
        self._say("the conversation begins anew")

    def _save(self, rest: str) -> None:
        force = rest.startswith("-f ")
        name = rest.removeprefix("-f ").strip()
        if not name:
            raise CommandError("/save needs a file", WRONG_USE)
        self._say(f"saved in {one_line(str(self._conversation.save(name, overwrite=force)))}")

    def _load(self, rest: str) -> None:
        if not rest:
            raise CommandError("/load needs a file", WRONG_USE)
        count = self._conversation.load(rest)
        self.last_question = None
        self._say(f"{count} messages")

    def _exit(self, rest: str) -> Next:
        return Next.END


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
