"""A worker that is prepared on its device while the one that it is to replace still computes there.

It maps the same weights, has loaded its kernels and recorded its graphs, and lacks KV memory alone,
of which it knows the addresses.
"""

from __future__ import annotations

import logging

from penstock.protocol.config import Config
from penstock.services.worker.executor import Executor
from penstock.services.worker.held.loading import NotPrepared, Preparation
from penstock.services.worker.load_report import LoadReport
from penstock.services.worker.loading import Loaded, Progress, load_executor

_log = logging.getLogger("penstock.worker")


class PreparedWorker:
    """All of a worker but its place among the others."""

    def __init__(self, config: Config) -> None:
        """Raises ``NotPrepared``, and what ``load_executor`` does."""
        self._reports = list[LoadReport]()
        self._preparation = Preparation()
        self._executor = load_executor(
            config, lambda note: None, self._reports.append, self._preparation
        )
        self._preparation.end()

    def load(self, config: Config, progress: Progress, loaded: Loaded) -> Executor:
        """Takes the place of ``load_executor`` when the one that it replaces has ended. Raises
        ``RuntimeError``."""
        progress("taking KV memory over")
        loaded(self._reports[-1])
        self._preparation.take_over()
        return self._executor


def prepare_worker(config: Config) -> PreparedWorker | None:
    """``None``: there is nothing to prepare it with, or no room, which the log says."""
    try:
        return PreparedWorker(config)
    except NotPrepared as reason:
        _log.warning("a worker is prepared without its device: %s", reason)
        return None
