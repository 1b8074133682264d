"""The table of a wire family: its marks, its states and what each transition does.

A table says nothing of tokens. Where the vocabulary has a mark as one added token, the engine knows
it by that id alone; elsewhere by its text. (So a text that only looks like a mark is none.)

The engine adds the states that all families share:

- ``begin``: the output begins, or goes on after reasoning or calls. Reasoning may open here.
- ``content``: free text, in which the family's ``openers`` are looked for.
- ``reasoning``: the same, up to the mark that closes it. A call that opens ends it.
- ``after``: a call has ended. White space is dropped, then ``begin``.

What every table must keep to, so that no cut of the text changes the events:

- A pattern ends with a mark, a literal or ``Ahead``: more text cannot lengthen its match.
- Of two edges that fit at the same place the first wins, and it is waited for while it may still
  come about. So the longer one stands first.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

from penstock.services.tokenizer.output.pattern import SPACE, Pattern, sequence


class Action(enum.Enum):
    """What an edge does when its pattern has come."""

    CALL = enum.auto()
    """A call opens. The pattern has a group ``name``, and perhaps ``id``: else one is made."""
    KEY = enum.auto()
    """A parameter (group ``key``) begins; its type is its schema's."""
    KEY_STRING = enum.auto()
    """… and is a string."""
    KEY_JSON = enum.auto()
    """… and is written as JSON."""
    VALUE_END = enum.auto()
    """The parameter's value ends."""
    END = enum.auto()
    """The call ends. What is still open of its arguments is closed."""
    DECLARED = enum.auto()
    """Beside ``CALL``: the edge fits only where ``name`` is that of a declared tool."""


class Edge(NamedTuple):
    """A transition: where ``pattern`` comes, ``actions`` happen, and ``to`` is the next state."""

    pattern: Pattern
    to: str
    actions: tuple[Action, ...] = ()


def behind_space(edges: tuple[Edge, ...]) -> tuple[Edge, ...]:
    """The edges with any white space before them, as ``Expect`` needs them."""
    return tuple(edge._replace(pattern=sequence(SPACE, edge.pattern)) for edge in edges)


class Channel(enum.Enum):
    """Where free text goes."""

    TEXT = enum.auto()
    REASONING = enum.auto()
    VALUE = enum.auto()
    """The value of the parameter that ``KEY`` began."""
    NOTHING = enum.auto()
    """It is dropped."""


class Free(NamedTuple):
    """Text of any length, until an edge fits."""

    channel: Channel
    edges: tuple[Edge, ...]
    strips: bool = False
    """White space before an edge is no part of the text."""


class Expect(NamedTuple):
    """One of the edges fits right here. If none does, the text is read in ``otherwise``."""

    edges: tuple[Edge, ...]
    otherwise: str = "content"
    actions: tuple[Action, ...] = ()
    """What happens on the way to ``otherwise``."""


class Arguments(Protocol):
    """Where a scanner writes the arguments of the call that is open."""

    def spend(self) -> bool:
        """One more key, value or bracket is read. ``False``: the output has had too many."""
        ...

    def write(self, text: str) -> None:
        """A part of the arguments' JSON, as it stands."""

    def key(self, name: str, form: Action = Action.KEY) -> None:
        """A parameter begins, whose value comes as text."""

    def value(self, text: str) -> None:
        """A part of its value."""

    def end_value(self) -> None:
        """Its value ends."""

    def close(self) -> None:
        """All parameters have come."""


class Scanner(Protocol):
    """Reads text of a syntax that no regular pattern describes, in pieces of any length. It never
    raises, and reads each character once."""

    done: bool
    """What was to be read is complete."""

    def feed(self, text: str, start: int, final: bool) -> int:
        """Read from ``start`` on. Returns the place behind what was read: that of a character that
        is not read (``done``), or that may begin one of the state's edges; else the end. With
        ``final`` no more text comes."""
        ...

    def skip(self, character: str) -> None:
        """The character where ``feed`` stopped begins no edge: it is text like any other."""

    def cut(self) -> None:
        """The text has ended, or an edge fitted: what is held back goes out."""

    def end(self) -> None:
        """The model has ended its output here: what is open is read as if it were closed."""


class Stops(str):
    """The characters that a state's edges and its quote begin with, escaped as in a character
    class."""

    __slots__ = ("edges", "idle", "quote")

    edges: str
    """Source of a regular expression that matches where an edge fits or may come to fit."""
    quote: str
    """The same of the state's quote."""
    idle: str
    """Alternatives of one that matches some of the characters where neither does."""


class QuotedScanner(Scanner, Protocol):
    """A scanner of texts in which a mark begins and ends strings (``Scan.quote``)."""

    @property
    def quoted(self) -> bool:
        """What comes is the inside of a string."""
        ...

    def quote(self, text: str) -> None:
        """The mark stands where ``feed`` stopped."""


class MakeScanner(Protocol):
    """Makes the scanner of a state when the state is entered."""

    def __call__(self, arguments: Arguments, stops: Stops) -> Scanner:
        """stops: where ``feed`` must end, outside of strings, for an edge to be looked for."""
        ...


class Scan(NamedTuple):
    """What a scanner reads, then ``to``. An edge that fits outside of strings ends it early."""

    scanner: MakeScanner
    to: str
    edges: tuple[Edge, ...] = ()
    discards: bool = False
    """What is read is no part of the arguments."""
    quote: Pattern | None = None
    """A mark that begins and ends strings; the scanner is a ``QuotedScanner``."""


State: TypeAlias = Free | Expect | Scan


class ReasoningMarks(NamedTuple):
    """How reasoning is written."""

    open: str = "<think>"
    close: str = "</think>"
    label: str = ""
    """A text that belongs to the opening mark and stands behind it."""


THINK_TAGS = ReasoningMarks()


class ChannelThinking(NamedTuple):
    """How reasoning is written among the messages of channels."""

    opened: str
    """What begins it, from where the prompt ends …"""
    closed: str
    """… and what ends it."""
    mark: str = ""
    """The mark that comes with every beginning of it …"""
    header: str = ""
    """… and if it begins other messages too, a regular expression of what follows it there."""
    in_header: bool = False
    """The prompt ends behind ``mark``, within the header."""
    following: str = ""
    """What stands between it and the next message."""
    reply: tuple[str, str] = ("", "")
    """What begins and ends words to the user …"""
    always_replies: bool = False
    """… which stand before calls even if there are none."""
    ending: str = ""
    """What may stand behind the last message."""


class IdStyle(enum.Enum):
    """Which ids a family's chat template can take back."""

    OPENAI = enum.auto()
    """``call_`` and 24 hexadecimal digits."""
    WRITTEN = enum.auto()
    """The model writes it (group ``id``)."""
    KIMI = enum.auto()
    """``functions.NAME:INDEX``, if the model has not written one."""
    MISTRAL = enum.auto()
    """Nine letters and digits."""


class ArgumentForm(enum.Enum):
    """How arguments are written, for grammars."""

    JSON = enum.auto()
    """One JSON object."""
    PARAMETERS = enum.auto()
    """One text or JSON value for each parameter, each between texts of its own."""
    LITERALS = enum.auto()
    """One literal for each parameter, with commas between (``Envelope.literals``)."""


class Literals(NamedTuple):
    """How arguments are written as literals, as ``CallScanner`` reads them."""

    assign: str
    """Between a parameter's name and its value."""
    quote: str = ""
    """What begins and ends a string, in which nothing is escaped then; names within objects have no
    quotes. Empty: strings, names within objects and constants are Python's or JSON's."""


class Envelope(NamedTuple):
    """How calls are written in full, for grammars. Texts may hold marks, which become references to
    tokens where they are tokens. ``{name}`` stands for the tool's name, ``{index}`` for the call's
    number, ``{key}`` for a parameter's name."""

    before_name: str
    """From the beginning of a call …"""
    after_name: str
    """… and from its name to its arguments."""
    end: str
    """From the arguments to the end of the call."""
    form: ArgumentForm = ArgumentForm.JSON
    open: str = ""
    """Before the first call …"""
    close: str = ""
    """… and after the last one."""
    separator: str | None = "\n"
    """Between two calls; ``None``: there is only ever one."""
    before_value: str = ""
    """``PARAMETERS``: before a value, with ``{key}`` …"""
    after_value: str = ""
    before_json: str = ""
    """… and before one that is no string, if it is another text."""
    value_excludes: str = ""
    """``PARAMETERS``: a text that no string may hold, since it ends the value."""
    literals: Literals | None = None
    """``LITERALS``: their syntax."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Family:
    """One wire form. See the module's text for what a table must keep to."""

    name: str
    marks: Mapping[str, str]
    """Name → text of each terminal."""
    openers: tuple[Edge, ...]
    """What opens calls within content or reasoning."""
    states: Mapping[str, State] = field(default_factory=dict)
    reasoning: ReasoningMarks | None = THINK_TAGS
    ids: IdStyle = IdStyle.OPENAI
    envelope: Envelope | None = None
    older_envelope: Envelope | None = None
    """That of models whose vocabulary lacks ``newer_mark`` …"""
    newer_mark: str = ""
    """… a mark which came with ``envelope``."""
    begin: tuple[Edge, ...] = ()
    """What may stand only where content would begin, like a call without any mark."""
    no_tools: frozenset[str] = frozenset()
    """Names that mean something else where a tool's would stand: no tool can be called by them."""
    declared_only: bool = False
    """Only names of declared tools open calls; any other text is content."""
    channels: bool = False
    """All output stands in channels of the family's own: its states hold whether tools are declared
    or not. One named ``thinking`` reads reasoning that the prompt has opened."""
    channel_thinking: ChannelThinking | None = None
    """``channels``: how reasoning and words to the user are told from other messages."""
    newlines: bool = False
    """``PARAMETERS``: a value's first and last line feed are no part of it."""
