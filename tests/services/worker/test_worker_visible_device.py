"""A worker sees one CUDA device: the one that its engine was given."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from penstock.protocol.config import ConfigError
from penstock.services.worker.visible_device import show_one_device


@pytest.mark.parametrize(
    ("before", "index", "after"),
    [
        (None, 0, "0"),
        (None, 5, "5"),
        ("2,3", 0, "2"),
        ("2, 3", 1, "3"),
        ("GPU-1a,GPU-2b", 1, "GPU-2b"),
        ("MIG-1a,MIG-2b", 0, "MIG-1a"),
    ],
)
def test_the_device_is_counted_among_those_that_are_shown(
    before: str | None, index: int, after: str
) -> None:
    environment = {} if before is None else {"CUDA_VISIBLE_DEVICES": before}
    show_one_device(index, environment)
    assert environment == {"CUDA_VISIBLE_DEVICES": after}


@pytest.mark.parametrize(("shown", "index"), [("2,3", 2), ("", 0), ("-1", 0), ("0,-1,1", 1)])
def test_a_device_that_is_not_shown_is_refused_with_both_numbers(shown: str, index: int) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": shown}
    with pytest.raises(ConfigError, match=rf"--device-index {index}: CUDA_VISIBLE_DEVICES={shown}"):
        show_one_device(index, environment)
    assert environment == {"CUDA_VISIBLE_DEVICES": shown}


def test_the_device_is_chosen_before_anything_can_have_called_cuda() -> None:
    """The driver reads the variable once, at its first call."""
    code = """
import os, sys
from penstock.protocol.config import Config
from penstock.protocol.config.fields import DeviceConfig
from penstock.protocol.config.sources import Source
from penstock.services import cli
from penstock.services.worker import service
def run(config):
    print(os.environ["CUDA_VISIBLE_DEVICES"], "torch" in sys.modules)
    return 0
service.run = run
config = Config(device=DeviceConfig(device="cuda", device_index=3))
sources = {"router": Source("flag", "")}
cli._run("worker", [config], sources, cli.Internal(), 0.0, False, (config, sources), "")
"""
    environment = {name: v for name, v in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert out.stdout.split() == ["3", "False"], out.stderr
