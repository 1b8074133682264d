"""Lines that the user types: edited and remembered, or as they come."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

HISTORY_LINES = 2000
Words = Callable[[str], Iterable[str]]
"""What may come next: whole lines for the beginning of one."""


class LineInput(Protocol):
    def read(self, prompt: str) -> str:
        """The next line.

        Raises ``EOFError`` at the end, and ``KeyboardInterrupt`` for Ctrl-C on an empty line; one
        that holds something is dropped by it.
        """


def history_file(environment: Mapping[str, str]) -> Path | None:
    """Made if need be, for its user alone; ``None``: it cannot be."""
    state = environment.get("XDG_STATE_HOME") or ""
    base = Path(state) if os.path.isabs(state) else Path.home() / ".local/state"
    path = base / "penstock" / "chat_history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError:
        return None
    return path


def line_input(history: Path | None, words: Words, *, cursor: bool) -> LineInput:
    """With prompt_toolkit where it is installed and the terminal has a movable ``cursor``, else
    with readline."""
    if cursor:
        try:
            return PromptToolkitInput(history, words)
        except ImportError:
            pass
    return ReadlineInput(history, words)


class PromptToolkitInput:
    """Alt-Enter begins a new line; what is pasted keeps its own. Raises ``ImportError``."""

    def __init__(self, history: Path | None, words: Words) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import Completer, Completion
        from prompt_toolkit.history import FileHistory, InMemoryHistory
        from prompt_toolkit.key_binding import KeyBindings

        class Lines(Completer):
            def get_completions(self, document: Any, complete_event: Any) -> Iterable[Completion]:
                begun = document.text_before_cursor
                for word in words(begun):
                    yield Completion(word, start_position=-len(begun))

        bindings = KeyBindings()

        @bindings.add("escape", "enter")
        def _(event: Any) -> None:
            event.current_buffer.insert_text("\n")

        self._session: PromptSession[str] = PromptSession(
            history=InMemoryHistory() if history is None else FileHistory(str(history)),
            completer=Lines(),
            complete_while_typing=False,
            key_bindings=bindings,
            enable_open_in_editor=True,
        )

    def read(self, prompt: str) -> str:
        from prompt_toolkit.formatted_text import FormattedText

        while True:
            try:
                return self._session.prompt(FormattedText([("bold", prompt)]))
            except KeyboardInterrupt:
                if not self._session.default_buffer.text:
                    raise


class ReadlineInput:
    """Python's own line editing. It cannot tell what Ctrl-C found in the line."""

    def __init__(self, history: Path | None, words: Words) -> None:
        try:
            import readline
        except ImportError:
            return
        if history is not None:
            try:
                readline.read_history_file(history)
            except OSError:
                history = None
        readline.set_history_length(HISTORY_LINES)
        readline.set_completer_delims("")
        readline.parse_and_bind("tab: complete")
        readline.set_completer(lambda text, state: [*words(text), None][state])
        self._readline, self._history = readline, history

    def read(self, prompt: str) -> str:
        line = input(prompt)
        if getattr(self, "_history", None) is not None:
            self._readline.append_history_file(1, self._history)
        return line


class PipedInput:
    """Lines of a stream that is no terminal, without a prompt."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines = iter(lines)

    def read(self, prompt: str) -> str:
        for line in self._lines:
            return line.rstrip("\r\n")
        raise EOFError
