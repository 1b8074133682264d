"""``--kernel-table``: choices of kernels that were measured on one kind of GPU, for that alone."""

from __future__ import annotations

from collections.abc import Callable

from penstock.kernels.kernel_table import Choice, read_choice, use_choices
from penstock.protocol.config import Config, ConfigError
from penstock.services.worker.cuda_driver import CudaDevice, read_device

_REMEDY = "run penstock tune here, or leave kernel_table and kernel_table_device out"


def use_kernel_table(config: Config, read: Callable[[], CudaDevice | None] = read_device) -> None:
    """Let the kernels of this process have the choices. read: asks which device there is.

    Raises ``ConfigError`` for a line that is none, and where the device is another.
    """
    use_choices(kernel_choices(config, read))


def kernel_choices(config: Config, read: Callable[[], CudaDevice | None]) -> list[Choice]:
    """See ``use_kernel_table``."""
    choices, wanted = read_table(config), config.device.kernel_table_device
    if not choices:
        return []
    if not wanted:
        raise ConfigError(
            "--kernel-table without --kernel-table-device: choices hold for the GPU that they were "
            f"measured on alone; name it, or {_REMEDY}"
        )
    device = read() if config.device.device == "cuda" else None
    here = device.name if device is not None else f"--device {config.device.device}"
    if here != wanted:
        raise ConfigError(
            f"--kernel-table was measured on {wanted}, and this worker computes on {here}: "
            f"{_REMEDY}"
        )
    return choices


def read_table(config: Config) -> list[Choice]:
    """The choices, for whatever device. Raises ``ConfigError`` for a line that is none."""
    try:
        return [read_choice(line) for line in config.device.kernel_table]
    except ValueError as failure:
        raise ConfigError(f"--kernel-table {failure}") from None
