"""What is begun before torch is imported."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from penstock.protocol.config import Config, DeviceConfig, ModelConfig
from penstock.protocol.model_info import BadModelFolder
from penstock.services.worker import early_start
from penstock.services.worker.loading import load_executor

HASHED = """
from penstock.services.worker.early_start import _hash_triton
_hash_triton()
from triton.runtime.cache import triton_key
assert triton_key.cache_info().currsize == 1
"""
CONTEXT_MADE = """
import ctypes, sys, threading
from penstock.services.worker.early_start import begin_early
begin_early()
for thread in threading.enumerate():
    if thread is not threading.main_thread():
        thread.join(60)
assert "torch" not in sys.modules
flags, active = ctypes.c_uint(), ctypes.c_int()
ctypes.CDLL("libcuda.so.1").cuDevicePrimaryCtxGetState(
    0, ctypes.byref(flags), ctypes.byref(active)
)
assert active.value == 1
import torch
assert torch.ones(2, device="cuda").sum().item() == 2
"""


class Driver:
    """One that has no device."""

    def __init__(self, name: str) -> None:
        self.asked: list[str] = []

    def cuInit(self, flags: int) -> int:  # noqa: N802 (the driver's name)
        self.asked.append("init")
        return 100


def begun(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads that ``begin_early`` begins, each of which has ended."""
    before = threading.enumerate()
    unhandled: list[object] = []
    monkeypatch.setattr(threading, "excepthook", unhandled.append)
    early_start.begin_early()
    threads = [thread for thread in threading.enumerate() if thread not in before]
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not unhandled
    return threads


def test_without_a_driver_nothing_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert not begun(monkeypatch)


def test_a_driver_without_a_device_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver("libcuda.so.1")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(early_start, "_hash_triton", lambda: None)  # it has a test of its own
    begun(monkeypatch)
    assert driver.asked == ["init"]


def test_triton_has_hashed_its_files_before_the_first_kernel_asks() -> None:
    pytest.importorskip("triton")
    subprocess.run([sys.executable, "-c", HASHED], check=True, timeout=100)


@pytest.mark.gpu
def test_the_device_has_its_context_before_torch_is_there() -> None:
    subprocess.run([sys.executable, "-c", CONTEXT_MADE], check=True, timeout=100)


def test_garbage_is_collected_again_after_a_load_that_failed(tmp_path: Path) -> None:
    config = Config(model=ModelConfig(model=str(tmp_path)), device=DeviceConfig(device="cpu"))
    with pytest.raises(BadModelFolder):
        load_executor(config, lambda note: None)
    assert gc.isenabled()
