"""A model's kernels, compiled by other processes while this one imports torch and reads weights.

Only where the cache has no marker for them (``kernel_cache``): a start that finds them compiled
begins no process. What fails here costs time, never the start: the worker compiles each kernel that
is not in the cache when it launches it first.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import IO

import msgspec

from penstock.kernels.gpu.device_facts import DeviceFacts
from penstock.protocol.config import Config
from penstock.protocol.config.machine import read_machine
from penstock.protocol.model_info import ModelInfo, read_model_info
from penstock.services.worker.cuda_driver import CudaDevice, read_device
from penstock.services.worker.kernel_cache import KernelCache, kernel_cache
from penstock.services.worker.kernel_needs import KernelNeeds, kernel_needs
from penstock.services.worker.kernel_report import LIMIT_SECONDS, CompilationReport
from penstock.services.worker.plan import device_found

MOST_PROCESSES = 14
_LEFT_CORES, _LEAST_CORES = 2, 4
"""The worker keeps so many cores for itself; with fewer than these it is alone."""
_MODULE = "penstock.services.worker.kernel_compilation"
_log = logging.getLogger("penstock.worker")


def _safe_path() -> list[str]:
    """The flag that keeps the current folder off the modules' path, if this process has it."""
    return ["-P"] if sys.flags.safe_path else []


def device_facts(device: CudaDevice) -> DeviceFacts:
    return DeviceFacts(device.capability, device.shared_bytes, device.multiprocessors)


class Compilation:
    """Processes that compile; they end with this one, and with ``stop``."""

    def __init__(
        self, needs: KernelNeeds, processes: int, limit_seconds: float = LIMIT_SECONDS
    ) -> None:
        """Raises ``OSError`` where none can be started."""
        self.processes = processes
        self._deadline = time.monotonic() + limit_seconds
        self._process = subprocess.Popen(
            [sys.executable, *_safe_path(), "-m", _MODULE, str(processes), str(limit_seconds)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        stdin, _ = self._pipes()
        stdin.write(msgspec.json.encode(needs) + b"\n")
        stdin.flush()

    def wait(self) -> CompilationReport:
        """Wait for the end. Raises ``ValueError`` where they have ended without a report."""
        _, stdout = self._pipes()
        text = b""
        while (left := self._deadline - time.monotonic()) > 0:
            if not select.select([stdout], [], [], left)[0]:
                break
            piece = os.read(stdout.fileno(), 1 << 16)
            if not piece:
                break
            text += piece
        self.stop()
        return msgspec.json.decode(text, type=CompilationReport)

    def stop(self) -> None:
        """End them: their standard input ends."""
        stdin, stdout = self._pipes()
        with contextlib.suppress(OSError):
            stdin.close()
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        stdout.close()

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise ValueError("the process was started without pipes")
        return stdin, stdout


class AheadCompilation:
    """What a worker's start has compiled for it, if anything."""

    def __init__(self, config: Config) -> None:
        """Looks for a device, a marker, and begins; all in a thread."""
        self.summary = ""
        """What was compiled; empty: nothing was begun."""
        self._needs: KernelNeeds | None = None
        self._cache: KernelCache | None = None
        self._compilation: Compilation | None = None
        self._stopped = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(
            target=self._begin, args=(config,), name="kernels", daemon=True
        )
        self._thread.start()

    def _begin(self, config: Config) -> None:
        try:
            device = read_device()
            if device is not None:
                self._begin_for(config, read_model_info(config.model.model), device)
        except Exception as failure:  # what is wrong with the model is told by who loads it
            self.summary = f"kernels were not compiled ahead: {type(failure).__name__}: {failure}"

    def _begin_for(self, config: Config, info: ModelInfo, device: CudaDevice) -> None:
        needs = kernel_needs(config, info, device_found(device), device_facts(device))
        if isinstance(needs, str):
            return
        cache = kernel_cache(needs)
        if cache.holds(needs):
            return
        self._needs, self._cache = needs, cache
        cores = read_machine().cores
        if cores < _LEAST_CORES:
            self.summary = f"kernels are not compiled ahead with {cores} cores"
            return
        processes = min(cores - _LEFT_CORES, MOST_PROCESSES)
        with self._lock:
            if not self._stopped:
                self._compilation = Compilation(needs, processes)

    def finish(self, progress: Callable[[str], None]) -> None:
        """``wait``, and say so if there are processes to wait for."""
        if self.processes:
            progress(f"compiling kernels in {self.processes} processes")
        self.wait()

    def wait(self) -> None:
        """Until all that is compiled ahead lies in the cache."""
        self._thread.join(LIMIT_SECONDS)
        with self._lock:
            compilation, self._compilation = self._compilation, None
        if compilation is None:
            return
        begun = time.monotonic()
        try:
            report = compilation.wait()
        except ValueError:
            _log.warning("the processes that compile kernels have ended early")
            return
        waited = time.monotonic() - begun
        self.summary = f"{report}; waited for {waited:.1f} s"
        for failure in report.failures:
            _log.warning("a kernel was not compiled ahead: %s", failure)

    @property
    def processes(self) -> int:
        """How many compile; 0: none."""
        self._thread.join(LIMIT_SECONDS)
        compilation = self._compilation
        return 0 if compilation is None else compilation.processes

    def complete(self) -> None:
        """The worker has launched all of its kernels: they are in the cache."""
        if self._needs is None or self._cache is None:
            return
        try:
            self._cache.complete(self._needs)
        except OSError as failure:
            _log.warning("Triton's cache cannot be written: %s", failure)

    def stop(self) -> None:
        """End what is still running."""
        with self._lock:
            self._stopped = True
            compilation, self._compilation = self._compilation, None
        if compilation is not None:
            compilation.stop()
