"""From a configuration to an executor that is ready for plans."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.protocol.config import Config
from penstock.protocol.model_info import read_model_info
from penstock.protocol.pooling import read_pooling
from penstock.protocol.tasks import load_tasks
from penstock.services.worker.ahead_checks import check_files
from penstock.services.worker.ahead_compilation import AheadCompilation
from penstock.services.worker.cpu_libraries import set_up_cpu_libraries
from penstock.services.worker.early_start import begin_early
from penstock.services.worker.executor import DirectExecutor, Executor
from penstock.services.worker.load_report import LoadReport
from penstock.services.worker.measured_kernels import use_kernel_table
from penstock.services.worker.memory import NULL_BLOCKS, plan_capacity, whole_prompts
from penstock.services.worker.null_engine import NullExecutor
from penstock.services.worker.pooling_tasks import null_tasks

if TYPE_CHECKING:
    from penstock.services.worker.held.loading import Preparation

Progress = Callable[[str], None]
Loaded = Callable[[LoadReport], None]
Load = Callable[[Config, Progress, Loaded], Executor]
LOAD_LIMIT_SECONDS = 1800.0
"""Most that ``load_executor`` takes of a sound model."""


def load_executor(
    config: Config,
    progress: Progress,
    loaded: Loaded = lambda report: None,
    preparation: Preparation | None = None,
) -> Executor:
    """Make the executor that ``config`` asks for and run it once.

    ``progress`` is told what is being done, ``loaded`` what was read, for people; preparation: see
    ``load_model_executor``. Raises ``BadModelFolder`` for a checkpoint that cannot be served and
    ``ConfigError`` for settings that do not fit it. torch is imported only for a real model.
    """
    info = read_model_info(config.model.model)
    check_files(config, info)  # damage is told before torch loads
    tasks, pooling = load_tasks(), read_pooling(info, config.model)
    gc.disable()  # until there is what will stay: it would be walked through again and again
    try:
        if config.device.device == "null":
            executor = _load_null(config)
        else:
            executor = _load(config, progress, loaded, preparation)
        if isinstance(executor, DirectExecutor):
            executor.tasks = {**executor.tasks, **tasks}
            executor.described = pooling.describe()
        gc.collect()
        gc.freeze()
    finally:
        gc.enable()
    return executor


def _load_null(config: Config) -> Executor:
    info = read_model_info(config.model.model)
    capacity = plan_capacity(config, info, 1, NULL_BLOCKS)
    pooling = read_pooling(info, config.model)
    if pooling.encoder:
        capacity = whole_prompts(capacity)
    executor = NullExecutor(capacity, info.eos_token_ids, config.device.null_step_ms / 1000.0)
    executor.tasks, executor.generates = null_tasks(pooling), pooling.generates
    executor.labels = pooling.labels
    return executor


def _load(
    config: Config, progress: Progress, loaded: Loaded, preparation: Preparation | None
) -> Executor:
    use_kernel_table(config)
    set_up_cpu_libraries()
    progress("importing torch")
    info = read_model_info(config.model.model)
    if read_pooling(info, config.model).encoder:
        from penstock.services.worker.encoders.loading import load_encoder_executor

        return load_encoder_executor(config, info, progress, loaded)
    if config.device.device == "cpu":
        return _load_model(config, progress, loaded, None)
    begin_early()
    ahead = AheadCompilation(config)
    try:
        return _load_model(config, progress, loaded, ahead, preparation)
    finally:
        ahead.stop()


def _load_model(
    config: Config,
    progress: Progress,
    loaded: Loaded,
    ahead: AheadCompilation | None,
    preparation: Preparation | None = None,
) -> Executor:
    from penstock.services.worker.model_loading import load_model_executor

    return load_model_executor(config, progress, loaded, ahead, preparation)
