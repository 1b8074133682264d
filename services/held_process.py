"""A process of an engine that is started ahead: all that takes long to import is there, and nothing
is on a device, unless it is to replace a worker whose weights are held.

Importing torch takes three seconds and more, which a model that sleeps need not wait for when it
wakes.
"""

from __future__ import annotations

import importlib

from penstock.protocol.config import Config


def import_all(name: str, config: Config) -> None:
    """What the process ``name`` imports at its start, and when it loads a model."""
    importlib.import_module(f"penstock.services.{name}.service")
    if name == "worker" and config.device.device != "null":
        from penstock.services.worker.cpu_libraries import set_up_cpu_libraries

        set_up_cpu_libraries()
        importlib.import_module("penstock.services.worker.model_loading")
        if config.device.device == "cuda":
            importlib.import_module("penstock.services.worker.gpu.decoder")


def prepare_on_device(name: str, config: Config) -> dict[str, object]:
    """Prepare a worker on its device, for the end of the one that computes there. Returns what
    ``run`` of its service is given; empty: it starts as ever."""
    if name != "worker" or config.device.device != "cuda" or not config.loading.hold_weights:
        return {}
    from penstock.services.worker.prepared_worker import prepare_worker

    prepared = prepare_worker(config)
    return {} if prepared is None else {"load": prepared.load}
