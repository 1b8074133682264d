"""A worker that was started ahead: all that takes long to import is there, and nothing on a device.

Importing torch takes three seconds and more, which a model that sleeps need not wait for when it
wakes.
"""

from __future__ import annotations

import importlib
import os

from penstock.protocol.config import Config
from penstock.services.worker.cpu_libraries import set_up_cpu_libraries

WANTED = b"1"


def wait_until_wanted(descriptor: int, config: Config) -> bool:
    """Import what loading a model needs, then wait for ``WANTED`` from a pipe. Returns whether it
    came; else whoever holds the other end is gone."""
    importlib.import_module("penstock.services.worker.service")
    if config.device.device != "null":
        set_up_cpu_libraries()
        importlib.import_module("penstock.services.worker.model_loading")
    if config.device.device == "cuda":
        importlib.import_module("penstock.services.worker.gpu.decoder")
    wanted = os.read(descriptor, len(WANTED)) == WANTED
    os.close(descriptor)
    return wanted
