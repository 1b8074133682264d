"""Which CUDA device a worker computes on: the only one that CUDA shows to its process.

A process that sees all devices needs to name its own in each thread and library, and what forgets
to uses the first one. So each worker sees one device, which is number 0 there.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from penstock.protocol.config import ConfigError
from penstock.protocol.config.machine import VISIBLE_DEVICES, visible_devices


def show_one_device(index: int, environment: MutableMapping[str, str]) -> None:
    """Let CUDA in this process see the device ``index`` of those that it sees now. Call it before
    anything calls CUDA, with the environment of the process.

    Raises ``ConfigError`` when CUDA_VISIBLE_DEVICES names fewer.
    """
    listed = visible_devices(environment.get(VISIBLE_DEVICES))
    if listed is None:
        environment[VISIBLE_DEVICES] = str(index)
    elif index < len(listed):
        environment[VISIBLE_DEVICES] = listed[index]
    else:
        raise ConfigError(
            f"--device-index {index}: {VISIBLE_DEVICES}={environment[VISIBLE_DEVICES]} shows "
            f"{len(listed)} CUDA device(s), counted from 0; choose one of them"
        )
