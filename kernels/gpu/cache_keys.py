"""The hashes by which Triton finds compiled kernels again, the same in every process.

Triton hashes a kernel with the functions that it calls and the constants of modules that all these
read. In two ways that depends on chance (3.6 and 3.7), and a kernel has now one hash, now another:

- It takes over the constants that a function reads just before it hashes the function: there are
  none yet, unless another kernel came first that calls it, too.
- It sorts constants by name and address. Where two modules have different ones of the same name,
  either may come first.
"""

from __future__ import annotations

from typing import Any

from triton.runtime import jit

_MARK = "hashes_alike"


class _ByModule(dict[Any, Any]):
    """Constants by name and module, which Triton puts in by name and address of the module."""

    def __setitem__(self, key: Any, value: Any) -> None:
        name, address = key
        super().__setitem__((name, str(value[1].get("__name__", address))), value)

    @classmethod
    def of(cls, found: dict[Any, Any]) -> _ByModule:
        """Those of a function that was hashed before: names and addresses do not sort together with
        names and modules."""
        made = cls()
        for key, value in found.items():
            made[key] = value
        return made


def make_keys_stable() -> bool:
    """Have Triton hash functions alike in all processes, from now on and in the whole process. What
    was hashed before keeps its hash. Returns whether this Triton can be told so."""
    finder = getattr(jit, "DependenciesFinder", None)
    take_over = getattr(finder, "_update_hash", None)
    if finder is None or take_over is None:
        return False
    if hasattr(take_over, _MARK):
        return True
    begin = finder.__init__

    def begin_by_module(self: Any, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, **named)
        self.used_global_vals = _ByModule()

    def hash_and_take_over(self: Any, function: Any) -> None:
        function.cache_key  # noqa: B018 - hashes it
        function.used_global_vals = _ByModule.of(function.used_global_vals)
        take_over(self, function)

    setattr(hash_and_take_over, _MARK, True)
    finder.__init__, finder._update_hash = begin_by_module, hash_and_take_over
    return True
