from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.worker.tiny_models import write_model

from penstock.services.worker.cpu_libraries import set_up_cpu_libraries

set_up_cpu_libraries()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Executors set the number that they were told; the next test shall not have it."""
    yield
    torch.set_num_threads(1)


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes milliseconds for each of the programs that would keep a GPU busy. Fewer
    still cut long rows."""
    if not torch.cuda.is_available():
        monkeypatch.setattr("penstock.kernels.gpu.device_facts._without_gpu", 2)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a variant of ``tiny_models``, written once in a run."""
    root = tmp_path_factory.mktemp("models")

    def folder(variant: str) -> Path:
        path = root / variant
        return path if path.exists() else write_model(variant, path)

    return folder
