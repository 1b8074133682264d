"""From a configuration to an executor that is ready for plans."""

from __future__ import annotations

import gc
from collections.abc import Callable

from penstock.protocol.config import Config
from penstock.protocol.model_info import read_model_info
from penstock.protocol.tasks import load_tasks
from penstock.services.worker.checkpoint import Checkpoint
from penstock.services.worker.cpu_libraries import set_up_cpu_libraries
from penstock.services.worker.early_start import begin_early
from penstock.services.worker.executor import DirectExecutor, Executor
from penstock.services.worker.load_report import LoadReport
from penstock.services.worker.memory import NULL_BLOCKS, plan_capacity
from penstock.services.worker.null_engine import NullExecutor

Progress = Callable[[str], None]
Loaded = Callable[[LoadReport], None]


def load_executor(
    config: Config, progress: Progress, loaded: Loaded = lambda report: None
) -> Executor:
    """Make the executor that ``config`` asks for and run it once.

    ``progress`` is told what is being done, ``loaded`` what was read, for people. Raises
    ``BadModelFolder`` for a checkpoint that cannot be served and ``ConfigError`` for settings that
    do not fit it. torch is imported only for a real model.
    """
    tasks = load_tasks()
    gc.disable()  # until there is what will stay: it would be walked through again and again
    try:
        if config.device.device == "null":
            executor = _load_null(config)
        else:
            executor = _load(config, progress, loaded)
        if isinstance(executor, DirectExecutor):
            executor.tasks = tasks
        gc.collect()
        gc.freeze()
    finally:
        gc.enable()
    return executor


def _load_null(config: Config) -> Executor:
    info = read_model_info(config.model.model)
    capacity = plan_capacity(config, info, 1, NULL_BLOCKS)
    return NullExecutor(capacity, info.eos_token_ids, config.device.null_step_ms / 1000.0)


def _load(config: Config, progress: Progress, loaded: Loaded) -> Executor:
    if config.loading.load_format != "dummy":
        Checkpoint(read_model_info(config.model.model).folder)  # damage is told before torch loads
    set_up_cpu_libraries()
    progress("importing torch")
    if config.device.device != "cpu":
        begin_early()
    from penstock.services.worker.model_loading import load_model_executor

    return load_model_executor(config, progress, loaded)
