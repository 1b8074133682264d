"""Triton's interpreter without what it computes again and again, and throws away.

Each instruction of a kernel is a few calls of numpy here, and took several times as long to be
prepared. What kernels compute, and what is refused of them, stays the same.
"""

from __future__ import annotations

import dataclasses
from typing import Any

MOST_NUMBERS, MANY = 1 << 14, 1 << 12
"""Numbers of a constant that is kept, and constants that are."""


def make_lean(interpreter: Any) -> None:
    """For the rest of the process. interpreter: ``triton.runtime.interpreter``."""
    _replace_once(interpreter)
    _leave_out_overflows(interpreter)
    _know_numpy_types(interpreter)
    _know_shapes(interpreter.tl.core)
    _see_equal_types(interpreter.tl.core)
    _see_equal_shapes(interpreter.interpreter_semantic)
    _see_equal_operands(interpreter.interpreter_semantic, interpreter.tl.core.tensor)
    _call_directly(interpreter)


def _replace_once(interpreter: Any) -> None:
    """The interpreter looks for the functions of ``triton.language`` that it replaces at each
    launch, and again at each call of a function within a kernel, which takes longer than what they
    compute here. In a test process they are replaced once, and stay so."""
    replace, replaced = interpreter._patch_lang, set[Any]()

    def replace_first(fn: Any) -> Any:
        if fn not in replaced:
            replace(fn)
            replaced.add(fn)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = replace_first


def _leave_out_overflows(interpreter: Any) -> None:
    """Each sum, difference and product of integers is computed a second time in 64 bits and
    compared with what 32 hold, for an assertion that is only made where ``debug`` is set."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _know_numpy_types(interpreter: Any) -> None:
    """numpy's type for one of Triton's is looked up in a table that is made for each look."""
    look, known = interpreter._get_np_dtype, dict[str, Any]()

    def known_type(kind: Any) -> Any:
        found = known.get(kind.name)
        if found is None:
            found = known[kind.name] = look(kind)
        return found

    interpreter._get_np_dtype = known_type


def _know_shapes(core: Any) -> None:
    """Tensors and their types make their shape of a dozen objects each, always the same ones."""
    tensor, block_type = core.tensor, core.block_type
    make_tensor, make_type = tensor.__init__, block_type.__init__
    of_tensors, of_types = dict[Any, Any](), dict[Any, Any]()

    def tensor_of_shape(self: Any, handle: Any, type: Any) -> None:
        shape = tuple(type.shape) if type.is_block() else ()
        if shape not in of_tensors:
            make_tensor(self, handle, type)
            of_tensors[shape] = self.numel, self.shape
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = of_tensors[shape]

    def type_of_shape(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *shape
        if key not in of_types:
            make_type(self, element_ty, shape)
            of_types[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = of_types[key]

    tensor.__init__, block_type.__init__ = tensor_of_shape, type_of_shape


def _see_equal_shapes(semantic: Any) -> None:
    """Before each operation of two tensors their shapes are compared number by number. Those that
    ``_know_shapes`` gives are one object where they are equal; of a scalar, too."""
    broadcast = semantic.broadcast_impl_value

    def broadcast_unequal(lhs: Any, rhs: Any) -> tuple[Any, Any]:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(lhs, rhs)

    semantic.broadcast_impl_value = broadcast_unequal


def _see_equal_types(core: Any) -> None:
    """Types are compared by their names, once it is known that neither is a constant."""
    equal = core.dtype.__eq__

    def same_or_equal(self: Any, other: Any) -> bool:
        return self is other or equal(self, other)

    core.dtype.__eq__ = same_or_equal


def _see_equal_operands(semantic: Any, tensor: type) -> None:
    """Of every two operands it is found out to which type both are cast. Two tensors of one type
    stay as they are, and a number that left a tensor as it was is the same constant the next time.

    A quotient may have another type than both, and a pointer is no operand of most operations.
    """
    check = semantic.binary_op_type_checking_impl
    constants = dict[Any, Any]()

    def checked(lhs: Any, rhs: Any, *flags: Any, **options: Any) -> tuple[Any, Any]:
        if type(lhs) is not tensor or options or len(flags) > 2 or lhs.dtype.is_ptr():
            return check(lhs, rhs, *flags, **options)
        if type(rhs) is tensor:
            if lhs.dtype is rhs.dtype:
                return semantic.broadcast_impl_value(lhs, rhs)
            return check(lhs, rhs, *flags)
        key = rhs, type(rhs), lhs.dtype.name, id(lhs.shape)
        constant = constants.get(key)
        if constant is not None:
            return lhs, constant
        left, constant = check(lhs, rhs, *flags)
        if left is lhs and constant.handle.data.size <= MOST_NUMBERS and len(constants) < MANY:
            constant.handle.data.flags.writeable = False
            constants[key] = constant
        return left, constant

    semantic.binary_op_type_checking_impl = checked


def _call_directly(interpreter: Any) -> None:
    """A function of ``triton.language`` is called through two others that look at its arguments."""
    looks = interpreter.tl.core.builtin(lambda: None).__code__
    semantic = interpreter.interpreter_semantic

    def patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        called = member.__wrapped__ if getattr(member, "__code__", None) is looks else member

        def direct(*arguments: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return called(*arguments, **options)

        scope.set_attr(obj, name, direct)

    interpreter._patch_attr = patch
