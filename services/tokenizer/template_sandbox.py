"""A Jinja environment in which a chat template can neither escape, nor hang, nor eat the memory.

A chat template is code that comes with a checkpoint. Jinja's immutable sandbox keeps it from
Python's internals; what it does not bound is bounded here:

- time: every loop item, call and operator looks at a deadline, so that nested loops and macro
  recursion end. A single C call works on at most ``MAX_CHARACTERS``.
- text: what the template puts out, each value it makes on the way, where an operator, filter or
  method could multiply its input (``'a' * 10**9``, ``|center(10**9)``, doubling in a loop), what
  ``{% set %}`` blocks, macros and calls collect, and all that one rendering makes together.
- ``range()``: Jinja's own limit, 100 000 items.

Text that the template itself wrote is known as such to the end (``template_text``).

The features are those of transformers' environment (trim and strip blocks, loop controls,
``tojson`` without HTML escapes, ``raise_exception``, ``strftime_now``, ``{% generation %}``), so
that equal messages give equal text.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from penstock.services.tokenizer.template_limits import (
    MAX_CHARACTERS,
    MAX_GROWTH,
    NEW_ITEM_BYTES,
    REFERENCE_BYTES,
    TemplateLimitExceeded,
    bound_format,
    bound_growth,
    bound_joined,
    bound_operator,
    pieces,
    require,
    size,
    strings_in,
)
from penstock.services.tokenizer.template_text import (
    TemplateText,
    TracingFormatter,
    joined,
    own_mask,
    plain,
    written,
)

MAX_SECONDS = 5.0
"""A rendering that takes longer is given up."""
FREE_SECONDS = 0.02
TURN_SECONDS = 0.0002
LONGEST_PAUSE_SECONDS = 0.001
"""A rendering that takes longer than the first of these gives the interpreter to the other threads
after every turn, for a pause that grows to the last: else slow ones would double what all others
wait for their first token."""


class _WatchLoops(NodeTransformer):
    """Wraps what every loop runs over, so that each item looks at the deadline."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802  # the name is Jinja's
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "_watched", [], [], None, None, lineno=node.lineno)
        return node


class _TracedCode(CodeGenerator):
    """Text of the template is marked as such; ``~`` and slices go through the environment, as the
    other operators do."""

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return _written_code("".join(map(str, group)))

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:  # noqa: N802  # as above
        if isinstance(node.value, str):
            self.write(_written_code(node.value))
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Frame) -> None:  # noqa: N802
        self.write(_written_code(node.data))

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802  # as above
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.counted(")
        super().visit_Getitem(node, frame)
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802  # as above
        self.write("environment.join_text((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


def _written_code(text: str) -> str:
    return f"environment.written({plain(text)!r})"


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's text for training; here it is transparent."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(plain(str(message)))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _traced(value: Any) -> Any:
    """A user's text, made to keep what an operation puts into it of the template's."""
    return TemplateText(value) if type(value) is str else value


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Compiles and renders chat templates. Safe to use from several threads."""

    code_generator_class = _TracedCode
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, max_seconds: float = MAX_SECONDS) -> None:
        # Not optimized: the optimizer would compute 'a'|center(10**9) while compiling, unbounded.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=["jinja2.ext.loopcontrols", _Generation],
            finalize=self._finalized,
        )
        self._max_seconds = max_seconds
        self._running = threading.local()
        self._written: dict[str, TemplateText] = {}
        self.filters = {
            name: self._bounded_filter(name, filter) for name, filter in self.filters.items()
        }
        self.filters["tojson"] = self._bounded_filter("tojson", _tojson)
        self.filters["_watched"] = self._watched
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def render(self, template: jinja2.Template, variables: dict[str, Any]) -> tuple[str, bytes]:
        """Render within the limits. Returns the text, and one byte for each of its characters: 1
        where the template wrote it.

        Raises ``TemplateLimitExceeded``, other ``jinja2.TemplateError``s, and whatever else the
        template's operations raise (``TypeError``, ``ValueError``, ``RecursionError``, …).
        """
        now = time.monotonic()
        self._running.began, self._running.deadline = now, now + self._max_seconds
        self._running.pause_at = now + FREE_SECONDS
        self._running.made = 0
        out = []
        length = 0
        for piece in template.generate(variables):
            length += len(piece)
            if length > MAX_CHARACTERS:
                raise TemplateLimitExceeded(f"its text is longer than {MAX_CHARACTERS} characters")
            out.append(piece)
        return "".join(out), b"".join(map(own_mask, out))

    def written(self, text: str) -> TemplateText:
        """A text that stands in the template; called by compiled templates alone."""
        found = self._written.get(text)
        if found is None:
            found = self._written[text] = written(text)
        return found

    def concat(self, parts: Iterable[str]) -> str:
        """What a block, macro or call has collected."""
        collected, length = [], 0
        for piece in parts:
            length += len(piece)
            require(length)
            collected.append(piece)
        self._count(length)
        return joined(collected)

    def counted(self, value: Any) -> Any:
        """A value that was just made. All that a rendering makes has a limit, since whatever it
        makes it may keep."""
        if isinstance(value, str | bytes):
            made = len(value)
        elif isinstance(value, list | tuple | dict | set):
            made = REFERENCE_BYTES * len(value)
        else:
            return value
        self._count(made)
        return value

    def _count(self, made: int) -> None:
        total = getattr(self._running, "made", 0) + made
        if total > MAX_GROWTH:
            raise TemplateLimitExceeded(
                f"it makes more than {MAX_GROWTH} characters in all, on the way to its text"
            )
        self._running.made = total

    def _check_time(self) -> None:
        now = time.monotonic()
        if now > getattr(self._running, "deadline", math.inf):
            raise TemplateLimitExceeded(f"it takes longer than {self._max_seconds:g} s")
        if now > getattr(self._running, "pause_at", math.inf):
            time.sleep(min((now - self._running.began) / 500, LONGEST_PAUSE_SECONDS))
            self._running.pause_at = time.monotonic() + TURN_SECONDS

    def _watched(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._check_time()
            yield item

    def _finalized(self, value: Any) -> Any:
        if not isinstance(value, str):
            amount = size(value)
            require(amount)
            self._count(amount)
        return value

    def _bounded_filter(self, name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
        passes_environment = hasattr(filter, "jinja_pass_arg")

        @wraps(filter)
        def bounded(*arguments: Any, **named: Any) -> Any:
            self._check_time()
            first, *rest = arguments[1:] if passes_environment else arguments
            self._count(NEW_ITEM_BYTES * pieces(name, first, tuple(rest)))
            if name == "join":
                items = list(first)
                bound_joined(str(named.get("d", (*rest, "")[0])), items)
                rest = list(map(_traced, rest))
                named = {"d": "", **named} if not rest else named
                named = {key: _traced(value) for key, value in named.items()}
                first = items
            else:
                bound_growth(name, first, tuple(rest), named)
                if name == "replace":
                    first = _traced(first)
            head = arguments[:1] if passes_environment else ()
            result = filter(*head, first, *rest, **named)
            return result if result is first else self.counted(result)

        return bounded

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template: nodes.Template = _WatchLoops().visit(super()._parse(source, name, filename))
        return template

    def join_text(self, parts: tuple[Any, ...]) -> str:
        """The ``~`` operator."""
        self._check_time()
        require(size(parts))
        text: str = self.counted(joined(map(str, parts)))
        return text

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self._check_time()
        bound_operator(operator, left, right)
        return self.counted(super().call_binop(context, operator, left, right))

    def call(self, context: Context, function: Any, /, *arguments: Any, **named: Any) -> Any:
        self._check_time()
        method = getattr(function, "__wrapped__", function)
        owner = getattr(method, "__self__", None)
        name = getattr(method, "__name__", "")
        if not isinstance(owner, str | bytes | int):
            return self.counted(super().call(context, function, *arguments, **named))
        if not isinstance(owner, int) and name == "join" and len(arguments) == 1:
            self._count(NEW_ITEM_BYTES * pieces(name, arguments[0], ()))
            arguments = (list(arguments[0]),)
            bound_joined(owner, arguments[0])
        else:
            self._count(NEW_ITEM_BYTES * pieces(name, owner, arguments))
            bound_growth(name, owner, arguments, named)
        if isinstance(owner, str):
            result = self._call_of_text(context, function, owner, name, arguments, named)
        else:
            result = super().call(context, function, *arguments, **named)
        return result if result is owner else self.counted(result)

    def _call_of_text(
        self,
        context: Context,
        function: Any,
        owner: str,
        name: str,
        arguments: tuple[Any, ...],
        named: dict[str, Any],
    ) -> Any:
        """A method of a text, also of a user's that takes text of the template into itself."""
        if name in ("format", "format_map") and type(owner) not in (str, TemplateText):
            for one in strings_in((*arguments, *named.values())):  # each may be a width
                bound_format(one)
        elif name == "format":
            return TracingFormatter(self).trace(_traced(owner), arguments, named)
        elif name == "format_map" and len(arguments) == 1:
            return TracingFormatter(self).trace(_traced(owner), (), arguments[0])
        if name in ("join", "replace") and type(owner) is str:
            function = getattr(_traced(owner), name)
        return super().call(context, function, *arguments, **named)
