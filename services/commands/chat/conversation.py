"""What was said, and with which settings it goes on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from penstock.services.commands.chat.answer import Answer
from penstock.services.commands.failure import WRONG_USE, CommandError


class Conversation:
    """The messages in the form of the API, without the system message, which ``system`` is."""

    def __init__(
        self, model: str, system: str = "", settings: dict[str, Any] | None = None
    ) -> None:
        self.model = model
        self.system = system
        self.settings = settings or {}
        """Fields of every request."""
        self.messages: list[dict[str, Any]] = []
        self.files: set[Path] = set()
        """Those that it was read from or written to, which may be overwritten."""

    def body(self) -> dict[str, Any]:
        """The request for the next answer."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        return {
            **self.settings,
            "model": self.model,
            "messages": head + self.messages,
            "stream_options": {"include_usage": True},
        }

    def say(self, text: str) -> None:
        """The user's next message, or the result of the tool call that waits for one."""
        waiting = self.waiting_calls()
        if waiting:
            call = waiting[0]
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
        else:
            self.messages.append({"role": "user", "content": text})

    def hear(self, answer: Answer) -> None:
        """Keep an answer, also one that was interrupted."""
        self.messages.append(answer.message())

    def waiting_calls(self) -> list[dict[str, Any]]:
        """The tool calls of the last answer that no result was given for, in their order."""
        given: set[str] = set()
        for message in reversed(self.messages):
            if message["role"] == "tool":
                given.add(message["tool_call_id"])
                continue
            calls = message.get("tool_calls") or []
            return [call for call in calls if call["id"] not in given]
        return []

    def take_back(self) -> str | None:
        """Forget the last message of the user and what came after it; returns it."""
        for place in range(len(self.messages) - 1, -1, -1):
            if self.messages[place]["role"] == "user":
                text = self.messages[place]["content"]
                del self.messages[place:]
                return text if isinstance(text, str) else None
        return None

    def save(self, name: str, *, overwrite: bool = False) -> Path:
        """Write it as JSON that only its user may read. Raises ``CommandError``."""
        path = Path(name).expanduser()
        known = path.absolute() in self.files
        if path.exists() and not known and not overwrite:
            raise CommandError(f"{path} is there already; /save -f {name} overwrites it")
        head = [{"role": "system", "content": self.system}] if self.system else []
        tree = {"model": self.model, "settings": self.settings, "messages": head + self.messages}
        text = msgspec.json.format(msgspec.json.encode(tree), indent=2)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(text + b"\n")
            partial.replace(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise CommandError(f"{path} cannot be written: {error.strerror}") from None
        self.files.add(path.absolute())
        return path

    def load(self, name: str) -> int:
        """Go on from a file that ``save`` wrote, or that holds a list of messages. Returns how many
        messages it holds. Raises ``CommandError``, and then nothing has changed."""
        path = Path(name).expanduser()
        try:
            tree = msgspec.json.decode(path.read_bytes())
            found = msgspec.convert(tree if isinstance(tree, dict) else {"messages": tree}, _Saved)
        except OSError as error:
            raise CommandError(f"{path} cannot be read: {error.strerror}", WRONG_USE) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CommandError(f"{path} holds no conversation: {error}", WRONG_USE) from None
        if any(one.role == "tool" and one.tool_call_id is None for one in found.messages):
            said = "a message of the role tool has no tool_call_id"
            raise CommandError(f"{path} holds no conversation: {said}", WRONG_USE)
        messages = [msgspec.to_builtins(one) for one in found.messages]
        system = [one["content"] for one in messages if one["role"] in ("system", "developer")]
        self.system = str(system[0]) if system else ""
        self.messages = [one for one in messages if one["role"] not in ("system", "developer")]
        self.settings = found.settings or self.settings
        self.files.add(path.absolute())
        return len(self.messages)


class _Function(msgspec.Struct):
    name: str
    arguments: str = ""


class _Call(msgspec.Struct):
    id: str
    function: _Function
    type: str = "function"


class _Message(msgspec.Struct, omit_defaults=True):
    role: str
    content: Any = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None


class _Saved(msgspec.Struct):
    messages: list[_Message]
    settings: dict[str, Any] = {}
