"""``penstock warm``: a model's kernels, compiled for a GPU that need not be here."""

from __future__ import annotations

from penstock.kernels.gpu.device_facts import DeviceFacts, facts_of
from penstock.protocol.config import Config, ConfigError
from penstock.protocol.config.machine import read_machine
from penstock.protocol.model_info import read_model_info
from penstock.services.worker.ahead_compilation import (
    MOST_PROCESSES,
    Compilation,
    device_facts,
)
from penstock.services.worker.cuda_driver import read_device
from penstock.services.worker.gpus import Gpu
from penstock.services.worker.kernel_cache import kernel_cache
from penstock.services.worker.kernel_needs import kernel_needs
from penstock.services.worker.kernel_report import CompilationReport
from penstock.services.worker.plan import PlannedDevice, device_found, device_of

NOT_ALL = 1
"""Exit code: kernels are missing."""
_LIMIT_SECONDS = 3600.0


def warm(config: Config, gpu: Gpu | None) -> tuple[str, int]:
    """Compile what a worker with this configuration needs; gpu: for which, by default this
    machine's. Returns what came of it, in lines, and the exit code.

    Raises ``BadModelFolder`` and ``ConfigError``.
    """
    device, facts = _device(gpu)
    info = read_model_info(config.model.model)
    needs = kernel_needs(config, info, device, facts, everything=True)
    if isinstance(needs, str):
        return f"no kernels of Penstock's own compute {info.folder}: {needs}", 0
    cache = kernel_cache(needs)
    cache.settle()
    processes = max(1, min(read_machine().cores, MOST_PROCESSES))
    try:
        report = Compilation(needs, processes, _LIMIT_SECONDS).wait()
    except ValueError:
        return "the processes that compile have ended early: is memory short?", NOT_ALL
    if not report.failures:
        cache.complete(needs)
    major, minor = facts.capability
    head = f"kernels of {info.folder} for {device.name} (compute capability {major}.{minor})"
    return "\n".join([head, *_lines(report), f"  in {cache.folder}"]), _code(report)


def _code(report: CompilationReport) -> int:
    return NOT_ALL if report.failures else 0


def _lines(report: CompilationReport) -> list[str]:
    lines = [f"  {report}", *(f"  not compiled: {failure}" for failure in report.failures)]
    chosen = [f"  {line}" for text in report.summary.split("\n") for line in text.split("; ")]
    return [*lines, *dict.fromkeys(chosen)]


def _device(gpu: Gpu | None) -> tuple[PlannedDevice, DeviceFacts]:
    if gpu is not None:
        return device_of(gpu), facts_of(gpu.capability, gpu.multiprocessors)
    found = read_device()
    if found is None:
        raise ConfigError("no CUDA device is here to compile for: name one, as in --gpu h100")
    return device_found(found), device_facts(found)
