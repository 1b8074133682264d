"""The arguments of an open call, as JSON that goes out while it comes about."""

from __future__ import annotations

from penstock.services.tokenizer.output.budget import Budget
from penstock.services.tokenizer.output.collected import Collected
from penstock.services.tokenizer.output.conversion import convert, quoted
from penstock.services.tokenizer.output.family import Action
from penstock.services.tokenizer.output.json_completion import completion
from penstock.services.tokenizer.output.machine import Machine
from penstock.services.tokenizer.output.tool_schemas import STRING, UNKNOWN, ToolParameters


class CallArguments:
    """Writes the arguments of one call.

    They come as JSON (``write``), which goes out as it stands, or as parameters (``key``,
    ``value``, ``end_value``), of which strings go out as they come and all else when it is whole:
    only then its type is known. A call without any has ``{}``.
    """

    __slots__ = (
        "_budget", "_form", "_index", "_json", "_key", "_kinds", "_line_feed", "_machine", "_out",
        "_parameters", "_pieces", "_started", "_streams", "_written",
    )  # fmt: skip

    def __init__(
        self,
        out: Collected,
        index: int,
        parameters: ToolParameters,
        machine: Machine,
        budget: Budget,
    ) -> None:
        self._out = out
        self._index = index
        self._parameters = parameters
        self._machine = machine
        self._budget = budget
        self._written = 0
        """Parameters whose key has gone out; -1: the arguments are JSON."""
        self._json: list[str] = []
        """What has gone out of arguments that are JSON."""
        self._key = False
        """A value is open."""
        self._form = Action.KEY
        self._kinds = UNKNOWN
        self._streams = False
        self._started = False
        """Something of the value has come."""
        self._line_feed = False
        """A line feed is held back that may be the value's last."""
        self._pieces: list[str] = []

    def spend(self) -> bool:
        """One more part is read; see ``Budget``."""
        return self._budget.spend()

    def write(self, text: str) -> None:
        """A part of the arguments' JSON, as it stands."""
        if text:
            text = self._machine.restore(text)
            if self._written <= 0:
                self._json.append(text)
            self._written = -1
            self._out.arguments(self._index, text)

    def key(self, name: str, form: Action = Action.KEY) -> None:
        """A parameter begins, whose value comes as text."""
        self.end_value()
        if self._written < 0:
            return
        self._key = True
        self._form = form
        self._kinds = STRING if form is Action.KEY_STRING else self._parameters.kinds(name)
        self._streams = self._kinds == STRING and form is not Action.KEY_JSON
        self._started = self._line_feed = False
        begin = ", " if self._written else "{"
        self._written += 1
        name = quoted(self._machine.restore(name))
        self._out.arguments(
            self._index, f'{begin}{name}: "' if self._streams else f"{begin}{name}: "
        )

    def value(self, text: str) -> None:
        """A part of the value of the open parameter."""
        if not self._key or not text:
            return
        text = self._machine.restore(text)
        if self._machine.family.newlines:
            if not self._started and text[0] == "\n":
                text = text[1:]
            self._started = True
            if not text:
                return
            if self._line_feed:
                text = "\n" + text
            self._line_feed = text[-1] == "\n"
            if self._line_feed:
                text = text[:-1]
        if self._streams:
            self._out.arguments(self._index, quoted(text)[1:-1])
        else:
            self._pieces.append(text)

    def end_value(self) -> None:
        """The value of the open parameter ends."""
        if not self._key:
            return
        self._key = self._line_feed = False
        if self._streams:
            self._out.arguments(self._index, '"')
            return
        text = "".join(self._pieces)
        self._pieces.clear()
        kinds = UNKNOWN if self._form is Action.KEY_JSON else self._kinds
        self._out.arguments(self._index, convert(text, kinds, self._budget))

    def close(self) -> None:
        """The call ends. What is open is closed."""
        self.end_value()
        if not self._written:
            self._out.arguments(self._index, "{}")
        elif self._written > 0:
            self._out.arguments(self._index, "}")
        elif self._json:
            self._out.arguments(self._index, completion("".join(self._json), self.spend))
            self._json.clear()
        self._written = -1

    def cut(self) -> None:
        """The output ends within the call: what is held back goes out, and nothing is closed."""
        if not self._key:
            return
        if self._line_feed and self._streams:
            self._out.arguments(self._index, "\\n")
        if not self._streams:
            self._out.arguments(self._index, "".join(self._pieces))
            self._pieces.clear()
        self._key = False

    def discarded(self) -> Nowhere:
        """Where a scanner writes what is no part of the arguments."""
        return Nowhere()


class Nowhere:
    """Arguments that go nowhere."""

    def spend(self) -> bool:
        return True

    def write(self, text: str) -> None: ...

    def key(self, name: str, form: Action = Action.KEY) -> None: ...

    def value(self, text: str) -> None: ...

    def end_value(self) -> None: ...

    def close(self) -> None: ...
