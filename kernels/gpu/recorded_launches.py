"""Launches without a device: which kernels some code launches, each to be compiled later.

Triton's own binder and specialization see the arguments, so a kernel that is compiled from here is
found in Triton's cache by the process that launches it with arguments alike. Tensors may lie on the
meta device.
"""

from __future__ import annotations

import contextlib
import inspect
import shutil
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from penstock.kernels.gpu.cache_keys import make_keys_stable

_DO_COMPILE = ("key", "signature", "device", "constexprs", "options", "attrs", "warmup")
_WARP = 32


class CannotRecord(Exception):
    """This Triton lacks a name that is needed. Says which."""


class Outcome(NamedTuple):
    found: bool
    """It was in the cache."""
    seconds: float


class Recorded(NamedTuple):
    """A kernel with what it is compiled for."""

    kernel: JITFunction[Any]
    arguments: dict[str, Any]
    """Of Triton's method that compiles."""

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)

    @property
    def cost(self) -> int:
        """A guess at how long it takes to compile: the length of its source and of all that it
        calls."""
        return _length(self.kernel, set())


class _Driver:
    """What Triton asks for before it launches."""

    utils = SimpleNamespace(launch=None)

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class _Nothing:
    """Stands for a compiled kernel; its launches do nothing."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments: None


class Recorder:
    """From its making on every launch of this process is recorded, and none happens. A process
    makes one."""

    def __init__(self, capability: tuple[int, int]) -> None:
        """capability: what is compiled for. Raises ``CannotRecord``."""
        self._compile = getattr(JITFunction, "_do_compile", None)
        found = () if self._compile is None else inspect.signature(self._compile).parameters
        if tuple(found)[1:] != _DO_COMPILE or not make_keys_stable():
            raise CannotRecord(
                f"Triton {triton.__version__} compiles by another method than "
                f"JITFunction._do_compile({', '.join(_DO_COMPILE)})"
            )
        major, minor = capability
        target = GPUTarget("cuda", 10 * major + minor, _WARP)
        triton.runtime.driver.set_active(_Driver(target))
        self._recorded: dict[tuple[int, str], Recorded] = {}
        run = JITFunction.run

        def record(kernel: JITFunction[Any], *values: Any) -> _Nothing:
            arguments = dict(zip(_DO_COMPILE, values, strict=True))
            nothing = _Nothing()
            kernel.device_caches[arguments["device"]][0][arguments["key"]] = nothing
            one = Recorded(kernel, arguments)
            self._recorded.setdefault((id(kernel), str(arguments["key"])), one)
            return nothing

        def bind(kernel: Any, *values: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            return run(kernel, *values, grid=grid, warmup=True, **options)

        JITFunction._do_compile = record
        JITFunction.run = bind

    @property
    def recorded(self) -> list[Recorded]:
        """Each kernel once, in the order of first launches."""
        return list(self._recorded.values())

    def compile(self, one: Recorded) -> Outcome:
        """Compile a kernel, and what launches it, into Triton's cache. Raises as Triton does."""
        begun = time.monotonic()
        kernel, found = self.compiled(one)
        _make_launcher(kernel)
        return Outcome(found, time.monotonic() - begun)

    def compiled(self, one: Recorded) -> tuple[Any, bool]:
        """Triton's compiled kernel, and whether it was in the cache. Raises as Triton does."""
        if self._compile is None:
            raise CannotRecord("nothing was recorded")
        hits: list[bool] = []

        def listen(*, cache_hit: bool, **rest: Any) -> None:
            hits.append(cache_hit)

        triton.knobs.compilation.listener = listen
        try:
            kernel = self._compile(one.kernel, *one.arguments.values())
        finally:
            triton.knobs.compilation.listener = None
        return kernel, all(hits)


def _make_launcher(kernel: Any) -> None:
    """Compile the C function that launches a kernel, which some versions of Triton have for each
    signature. Without it the first launch does so."""
    with contextlib.suppress(Exception):
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(kernel.src, kernel.metadata)


def make_driver_module() -> None:
    """Compile the C functions by which Triton loads all kernels, once for a cache."""
    with contextlib.suppress(Exception):
        from triton.backends.nvidia.driver import CudaUtils

        CudaUtils()


def allow_linking(folder: Path) -> None:
    """Where there is no driver, as in an image's build, let launchers be linked with an empty
    library of its name, which is put into ``folder``: they find the real one when they are
    loaded."""
    with contextlib.suppress(Exception):
        from triton.backends.nvidia import driver

        try:
            driver.libcuda_dirs()
        except Exception:
            library, compiler = folder / "libcuda.so.1", shutil.which("gcc") or shutil.which("cc")
            if compiler:
                options = "-shared", "-Wl,-soname,libcuda.so.1", "-x", "c", "/dev/null"
                subprocess.run([compiler, *options, "-o", str(library)], check=True)
                triton.knobs.nvidia.libcuda_path = str(folder)


def _length(function: Any, seen: set[int]) -> int:
    """Characters of a function and of those that it calls, each once."""
    if id(function) in seen or not hasattr(function, "src"):
        return 0
    seen.add(id(function))
    code = function.fn.__code__
    names = (function.__globals__.get(name) for name in code.co_names)
    called = (value for value in names if hasattr(value, "cache_key"))
    return len(function.src) + sum(_length(value, seen) for value in called)
