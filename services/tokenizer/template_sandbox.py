"""A Jinja environment in which a chat template can neither escape, nor hang, nor eat the memory.

A chat template is code that comes with a checkpoint. Jinja's immutable sandbox keeps it from
Python's internals; what it does not bound is bounded here:

- time: every loop item, call and operator looks at a deadline, so that nested loops and macro
  recursion end. A single C call works on at most ``MAX_CHARACTERS``.
- text: what the template puts out, and each value it makes on the way, where an operator, filter
  or method could multiply its input (``'a' * 10**9``, ``|center(10**9)``, doubling in a loop).
- ``range()``: Jinja's own limit, 100 000 items.

The features are those of transformers' environment (trim and strip blocks, loop controls,
``tojson`` without HTML escapes, ``raise_exception``, ``strftime_now``, ``{% generation %}``), so
that equal messages give equal text.
"""

from __future__ import annotations

import json
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

MAX_CHARACTERS = 8 * 1024 * 1024
"""Longest rendered text and longest value made on the way."""
MAX_GROWTH = 16 * MAX_CHARACTERS
"""Bound on (input size * width), a coarse bound on what padding and formatting may make."""
MAX_SECONDS = 5.0
"""A rendering that takes longer is given up."""
_MAX_BITS = 4096

_WIDENING = {
    "batch", "center", "expandtabs", "format", "format_map", "indent", "ljust", "rjust", "slice",
    "to_bytes", "tojson", "translate", "urlize", "wordwrap", "xmlattr", "zfill",
}  # fmt: skip
"""Filters and methods whose result can be as large as (value * sum of arguments)."""
_STRUCTURAL = {
    "attr", "count", "d", "default", "dictsort", "first", "groupby", "items", "last", "length",
    "list", "map", "reject", "rejectattr", "reverse", "select", "selectattr", "sort", "unique",
}  # fmt: skip
"""Filters that never turn a container into text: measuring it at each use would be quadratic."""


class TemplateLimitExceeded(jinja2.TemplateRuntimeError):
    """The template asked for more time or memory than a rendering may take."""


def _size(value: Any) -> int:
    """Characters in a value and what it contains, an item counting as 8 (a reference's bytes).

    Stops counting past the limit.
    """
    if isinstance(value, str | bytes):
        return len(value)
    if not isinstance(value, list | tuple | dict | set):
        return 0
    total = 0
    pending: list[Any] = [value]
    while pending and total <= MAX_GROWTH:
        item = pending.pop()
        if isinstance(item, str | bytes):
            total += len(item)
        elif isinstance(item, list | tuple | set):
            total += 8 * len(item)
            pending.extend(item)
        elif isinstance(item, dict):
            total += 8 * len(item)
            pending.extend(item)
            pending.extend(item.values())
    return total


def _require(size: int, limit: int = MAX_CHARACTERS) -> None:
    if size > limit:
        raise TemplateLimitExceeded(f"it makes a value larger than {MAX_CHARACTERS} characters")


def _width(arguments: Iterable[Any]) -> int:
    """How much each character of a value may be widened by these arguments."""
    total = 1
    for argument in arguments:
        total += abs(argument) if isinstance(argument, int) else _size(argument)
    return total


def _bound_growth(name: str, value: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Refuse a filter or method call whose result could be too large."""
    if name in _STRUCTURAL:
        return
    _require(_size(value))
    every = (*arguments, *named.values())
    if name == "replace" and isinstance(value, str) and len(arguments) >= 2:
        old, new = str(arguments[0]), str(arguments[1])
        _require(len(value) + value.count(old) * len(new))
    elif name in _WIDENING:
        _require(max(1, _size(value)) * _width(every), MAX_GROWTH)
        if isinstance(value, str) and name in ("format", "format_map"):
            _bound_format(value)


def _bound_format(text: str) -> None:
    """A width of five digits or more in a format string pads; no chat template needs that."""
    digits = 0
    for character in text:
        digits = digits + 1 if character.isdigit() else 0
        if digits >= 5 or character == "*":
            raise TemplateLimitExceeded("it formats with a width that is too large")


def _bound_joined(separator: str, items: list[Any]) -> None:
    _require(_size(items) + len(separator) * len(items))


def _bound_operator(operator: str, left: Any, right: Any) -> None:
    if operator == "+":
        if not isinstance(left, int | float):
            _require(_size(left) + _size(right))
    elif operator == "*":
        if isinstance(left, int) and isinstance(right, int):
            _require_bits(left.bit_length() + right.bit_length())
        elif isinstance(left, int):
            _require(_size(right) * max(left, 0))
        elif isinstance(right, int):
            _require(_size(left) * max(right, 0))
    elif operator == "**":
        if isinstance(left, int) and isinstance(right, int):
            _require_bits(left.bit_length() * max(right, 0))
    elif operator == "%" and isinstance(left, str):
        _bound_format(left)
        _require(len(left) + left.count("%") * _size((right,)))


def _require_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise TemplateLimitExceeded(f"it makes a number of more than {_MAX_BITS} bits")


class _WatchLoops(NodeTransformer):
    """Wraps what every loop runs over, so that each item looks at the deadline."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802  # the name is Jinja's
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "_watched", [], [], None, None, lineno=node.lineno)
        return node


class _BoundedConcat(CodeGenerator):
    """``~`` goes through the environment, as the other operators do."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802  # as above
        self.write("environment.join_text((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's text for training; here it is transparent."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


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


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Compiles and renders chat templates. Safe to use from several threads."""

    code_generator_class = _BoundedConcat
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
        self.filters = {
            name: self._bounded_filter(name, filter) for name, filter in self.filters.items()
        }
        self.filters["tojson"] = self._bounded_filter("tojson", _tojson)
        self.filters["_watched"] = self._watched
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def render(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        """Render within the limits.

        Raises ``TemplateLimitExceeded``, other ``jinja2.TemplateError``s, and whatever else the
        template's operations raise (``TypeError``, ``ValueError``, ``RecursionError``, …).
        """
        self._running.deadline = time.monotonic() + self._max_seconds
        pieces = []
        length = 0
        for piece in template.generate(variables):
            length += len(piece)
            if length > MAX_CHARACTERS:
                raise TemplateLimitExceeded(f"its text is longer than {MAX_CHARACTERS} characters")
            pieces.append(piece)
        return "".join(pieces)

    def _check_time(self) -> None:
        if time.monotonic() > getattr(self._running, "deadline", float("inf")):
            raise TemplateLimitExceeded(f"it takes longer than {self._max_seconds:g} s")

    def _watched(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._check_time()
            yield item

    def _finalized(self, value: Any) -> Any:
        if not isinstance(value, str):
            _require(_size(value))
        return value

    def _bounded_filter(self, name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
        passes_environment = hasattr(filter, "jinja_pass_arg")

        @wraps(filter)
        def bounded(*arguments: Any, **named: Any) -> Any:
            self._check_time()
            first, *rest = arguments[1:] if passes_environment else arguments
            if name == "join":
                items = list(first)
                _bound_joined(str((*rest, *named.values(), "")[0]), items)
                head = arguments[:1] if passes_environment else ()
                return filter(*head, items, *rest, **named)
            _bound_growth(name, first, tuple(rest), named)
            return filter(*arguments, **named)

        return bounded

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template: nodes.Template = _WatchLoops().visit(super()._parse(source, name, filename))
        return template

    def join_text(self, parts: tuple[Any, ...]) -> str:
        """The ``~`` operator."""
        self._check_time()
        _require(_size(parts))
        return "".join(map(str, parts))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self._check_time()
        _bound_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, /, *arguments: Any, **named: Any) -> Any:
        self._check_time()
        method = getattr(function, "__wrapped__", function)
        owner = getattr(method, "__self__", None)
        name = getattr(method, "__name__", "")
        if isinstance(owner, str) and name == "join" and len(arguments) == 1:
            arguments = (list(arguments[0]),)
            _bound_joined(owner, arguments[0])
        elif isinstance(owner, str | bytes | int):
            _bound_growth(name, owner, arguments, named)
        return super().call(context, function, *arguments, **named)
