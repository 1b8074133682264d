"""How an answer is shown: on a terminal, or as plain text."""

from __future__ import annotations

import os
import sys
from typing import Any, Protocol

from penstock.protocol.config.terminal import Style
from penstock.services.commands.chat.answer import Answer, Kind
from penstock.services.commands.printable import one_line, printable

CLEAR = "\x1b[2J\x1b[H"
_CALL = "\x1b[36m"
_DEFAULT_SIZE = (80, 24)


class View(Protocol):
    """Shows one answer after the other."""

    def begin(self, asked: str) -> None: ...

    def piece(self, kind: Kind, text: str) -> None: ...

    def due(self) -> float | None:
        """In how many seconds ``draw`` is to be called, if ever."""

    def draw(self) -> None: ...

    def resized(self) -> None: ...

    def end(self, answer: Answer) -> None: ...


class PlainView:
    """Text as it comes. What is not the answer goes to standard error."""

    def __init__(self, style: Style, *, thinking: bool = False, neutral: bool = True) -> None:
        """``thinking``: show it too; ``neutral``: leave nothing that a terminal would obey."""
        self._style = style
        self._thinking = thinking
        self._shown = printable if neutral else _writable
        self._kind: Kind = "text"
        self._last = "\n"

    def begin(self, asked: str) -> None:
        self._kind, self._last = "text", "\n"

    def piece(self, kind: Kind, text: str) -> None:
        if kind == "thinking" and not self._thinking:
            return
        if kind != self._kind:
            self._write("" if self._last.endswith("\n") else "\n")
            self._kind = kind
        shown = self._shown(text)
        self._write(self._style.dim(shown) if kind == "thinking" else shown)
        self._last = text

    def due(self) -> float | None:
        return None

    def draw(self) -> None:
        pass

    def resized(self) -> None:
        pass

    def end(self, answer: Answer) -> None:
        if not self._last.endswith("\n"):
            self._write("\n")
        for call in answer.calls:
            self._write(f"{called(call)}\n")
        if answer.empty and answer.finish == "length":
            reason = "the limit of tokens was reached before the answer began; raise --max-tokens"
            print(f"penstock: {reason}", file=sys.stderr)

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


class MarkdownView:
    """On a terminal: thinking dimmed, the answer as Markdown, calls and notes in lines of their
    own."""

    def __init__(self, style: Style, *, thinking: bool = True) -> None:
        self._style = style
        self._show_thinking = thinking
        self._asked = ""
        self._pieces: list[tuple[Kind, str]] = []
        self._reset()

    def _reset(self) -> None:
        from penstock.services.commands.chat.markdown import MarkdownStream

        self._stream = MarkdownStream(self._write, terminal_size, colour=self._style.colour)
        self._thought = ""
        """The end of the thinking that is shown; empty while none is."""
        self._columns = terminal_size()[0]

    def begin(self, asked: str) -> None:
        self._asked, self._pieces = asked, []
        self._reset()

    def piece(self, kind: Kind, text: str) -> None:
        self._pieces.append((kind, text))
        self._show(kind, text)

    def _show(self, kind: Kind, text: str) -> None:
        if kind == "thinking":
            if self._show_thinking:
                shown = printable(text if self._thought else text.lstrip())
                self._thought = shown or self._thought
                self._write(self._style.dim(shown))
        else:
            self._end_thinking()
            self._stream.feed(text)

    def _end_thinking(self) -> None:
        if self._thought:
            self._write("\n" if self._thought.endswith("\n") else "\n\n")
            self._thought = ""

    def due(self) -> float | None:
        return self._stream.due()

    def draw(self) -> None:
        self._stream.draw()

    def resized(self) -> None:
        """Draw the answer anew: what a terminal makes of lines of another width differs."""
        if terminal_size()[0] == self._columns:
            return
        self._reset()
        self._write(f"{CLEAR}{self._style.dim('> ' + printable(self._asked))}\n")
        for kind in ("thinking", "text"):
            if text := "".join(piece for of, piece in self._pieces if of == kind):
                self._show(kind, text)

    def end(self, answer: Answer) -> None:
        self._end_thinking()
        self._stream.draw(whole=True)
        for call in answer.calls:
            self._write(f"{self._style.paint(_CALL, called(call))}\n")
        if notes := answer.notes():
            self._write(f"{self._style.dim('(' + one_line('; '.join(notes)) + ')')}\n")
        self._write("\n")

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def called(call: dict[str, Any]) -> str:
    """A tool call as a line."""
    function = call["function"]
    return f"→ {one_line(function['name'])}({one_line(function['arguments'])})"


def terminal_size() -> tuple[int, int]:
    """Columns and lines of the terminal at standard output."""
    try:
        columns, rows = os.get_terminal_size(sys.stdout.fileno())
    except OSError:
        return _DEFAULT_SIZE
    return columns or _DEFAULT_SIZE[0], rows or _DEFAULT_SIZE[1]


def _writable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
