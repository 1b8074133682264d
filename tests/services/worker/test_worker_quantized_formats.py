"""Quantized checkpoints: whatever the format, the model computes with the numbers it stands for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quantized_folders import WRITERS, Twins, Writer, compressed_config, set_config, write_twins
from whole_logits import our_logits

Folder = Callable[[str], Path]
WIDE = "llama3-wide"


def twins(tiny_folder: Folder, folder: Path, writer: Writer, variant: str = WIDE) -> Twins:
    return write_twins(tiny_folder(variant), folder, writer)


@pytest.mark.parametrize("name", list(WRITERS))
def test_logits_are_those_of_the_dequantized_weights(
    name: str, tiny_folder: Folder, tmp_path: Path
) -> None:
    quantized, plain = twins(tiny_folder, tmp_path, WRITERS[name])
    torch.testing.assert_close(our_logits(quantized), our_logits(plain), rtol=2e-4, atol=2e-4)
