"""``--kernel-table``: for the GPU that it was measured on, and for no other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.kernels.kernel_table import chosen, use_choices
from penstock.protocol.config import Config, ConfigError, DeviceConfig, ModelConfig
from penstock.services.worker.cuda_driver import CudaDevice
from penstock.services.worker.loading import load_executor
from penstock.services.worker.measured_kernels import use_kernel_table

H100 = CudaDevice("NVIDIA H100 80GB HBM3", (9, 0), 1, 1, 132)
LINE = "hopper_rows 1024x3072 = 5 64"


@pytest.fixture(autouse=True)
def _none_are_left() -> Iterator[None]:
    yield
    use_choices([])


def config(*lines: str, on: str = H100.name, device: str = "cuda") -> Config:
    return Config(
        device=DeviceConfig(
            device=device,  # type: ignore[arg-type]
            kernel_table=list(lines),
            kernel_table_device=on,
        )
    )


def test_kernels_have_the_choices_of_the_table_on_the_gpu_that_it_was_measured_on() -> None:
    use_kernel_table(config(LINE), lambda: H100)
    assert chosen("hopper_rows", 1024, 3072) == (5, 64)
    use_kernel_table(config(on=""), lambda: H100)
    assert chosen("hopper_rows", 1024, 3072) is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            config(LINE, on="NVIDIA A100-SXM4-80GB"),
            "measured on NVIDIA A100-SXM4-80GB, and this worker computes on NVIDIA H100 80GB HBM3: "
            "run penstock tune here, or leave kernel_table",
        ),
        (config(LINE, device="cpu"), "this worker computes on --device cpu"),
        (config(LINE, on=""), "--kernel-table without --kernel-table-device"),
        (config("many 1 = 2"), "--kernel-table 'many 1 = 2': no such table"),
    ],
    ids=["another", "cpu", "unnamed", "line"],
)
def test_a_table_of_another_device_and_lines_that_are_none_are_refused(
    given: Config, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        use_kernel_table(given, lambda: H100)


def test_a_worker_with_a_table_of_another_device_does_not_start(
    tiny_folder: Callable[[str], Path],
) -> None:
    given = Config(
        model=ModelConfig(model=str(tiny_folder("llama3"))),
        device=DeviceConfig(device="cpu", kernel_table=[LINE], kernel_table_device=H100.name),
    )
    with pytest.raises(ConfigError, match="measured on NVIDIA H100 80GB HBM3"):
        load_executor(given, lambda text: None)
