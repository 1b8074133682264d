"""Whether a kernel that is launched early waits for the kernel ahead of it on each of its exits.

The kernel behind waits for this one alone: a program that ends without having waited lets it start
while what came before this one may still be written. Read from the kernel's source, with the values
of the constants that it is compiled with: conditions on these are decided, of others both ways are
followed. Of partitions of warps one at least must wait.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

WAIT = "gdc_wait"
Ways = frozenset[bool]
"""Of ways to a place in a function: whether one has waited, and whether one has not."""


class Given:
    """A pointer, of which nothing is known but that it is not ``None``."""


class _Unknown(Exception):
    """The value of an expression is known on the device alone."""


class _Reader:
    def __init__(self, names: dict[str, Any], constants: dict[str, Any]) -> None:
        self._names, self._constants = names, dict(constants)
        self.ended: Ways = frozenset()
        """Of the ways that returned."""

    def follow(self, body: Iterable[ast.stmt], ways: Ways) -> Ways:
        """The ways at the end of statements, by those at their beginning."""
        for statement in body:
            ways = self._step(statement, ways)
        return ways

    def _step(self, statement: ast.stmt, ways: Ways) -> Ways:
        match statement:
            case ast.Return():
                self.ended |= self._calls(statement, ways)
                return frozenset()
            case ast.If():
                try:
                    taken = statement.body if self._decided(statement.test) else statement.orelse
                except _Unknown:
                    either = self.follow(statement.body, ways)
                    return either | self.follow(statement.orelse, ways)
                return self.follow(taken, ways)
            case ast.For() | ast.While():
                return ways | self.follow(statement.body, ways)
        return self._calls(statement, ways)

    def _calls(self, node: ast.AST, ways: Ways) -> Ways:
        """Those behind a statement without branches: all have waited if it waits."""
        calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
        if ways and any(self._waits(call) for call in calls):
            return frozenset({True})
        return ways

    def _waits(self, call: ast.Call) -> bool:
        if isinstance(call.func, ast.Attribute):
            if call.func.attr == "warp_specialize" and isinstance(call.args[0], ast.List):
                return any(self._partition_waits(each) for each in call.args[0].elts)
            return call.func.attr == WAIT
        return isinstance(call.func, ast.Name) and self._called_waits(call.func.id, call.args)

    def _partition_waits(self, partition: ast.expr) -> bool:
        match partition:
            case ast.Tuple(elts=[ast.Name(id=name), ast.Tuple(elts=args)]):
                return self._called_waits(name, args)
        return False

    def _called_waits(self, name: str, args: list[ast.expr]) -> bool:
        function = getattr(self._names.get(name), "fn", None)
        if not inspect.isfunction(function):
            return False
        constants = {}
        for parameter, arg in zip(inspect.signature(function).parameters, args, strict=False):
            try:
                constants[parameter] = self._value(arg)
            except _Unknown:
                continue
        return waits(function, constants)

    def _decided(self, test: ast.expr) -> bool:
        value = self._value(test)
        if isinstance(value, Given):
            raise _Unknown
        return bool(value)

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name() if node.id in self._constants:
                return self._constants[node.id]
            case ast.UnaryOp(op=ast.Not()):
                return not self._decided(node.operand)
            case ast.Compare(ops=[operator], comparators=[right]):
                return self._compared(node.left, operator, right)
        raise _Unknown

    def _compared(self, left: ast.expr, operator: ast.cmpop, right: ast.expr) -> bool:
        one, other = self._value(left), self._value(right)
        match operator:
            case ast.Is():
                return one is other
            case ast.IsNot():
                return one is not other
        if isinstance(one, Given) or isinstance(other, Given):
            raise _Unknown
        match operator:
            case ast.Eq():
                return bool(one == other)
            case ast.NotEq():
                return bool(one != other)
        raise _Unknown


def waits(function: Callable[..., Any], constants: dict[str, Any]) -> bool:
    """Whether each way through the function waits. constants: values of some of its arguments, and
    ``Given()`` for pointers, which are not ``None``."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    if not isinstance(tree, ast.FunctionDef):
        raise TypeError(f"{function} is no function")
    assigned = {
        each.id
        for each in ast.walk(tree)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    }
    constants = {name: value for name, value in constants.items() if name not in assigned}
    names = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    reader = _Reader(names, constants)
    ways = reader.follow(tree.body, frozenset({False}))
    return False not in ways | reader.ended
