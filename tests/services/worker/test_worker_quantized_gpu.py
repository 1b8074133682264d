"""Quantized models on the executor for GPUs; without a GPU its kernels are interpreted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from support.worker.plan_driver import PlanDriver
from support.worker.quantized_folders import WRITERS, Writer, compressed, write_twins
from support.worker.tiny_models import some_prompts

from penstock.protocol.model_info import read_model_info
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.services.worker.gpu.compressed_layers import why_never
from penstock.services.worker.gpu.decoder import dense_executor
from penstock.services.worker.gpu.layer_products import most_fused_rows
from penstock.services.worker.model_executor import ModelExecutor
from penstock.services.worker.model_weights import load_model
from penstock.services.worker.models.decoder import Decoder
from penstock.services.worker.models.dense import DenseConfig, dense_config
from penstock.services.worker.models.dense_form import DenseModel, dense_model
from penstock.services.worker.models.weight_words import words_of_products

pytestmark = pytest.mark.usefixtures("few_programs")
Folder = Callable[[str], Path]
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
SIZES = EngineSizes(80, 16, 4, 48, 256, 307)
MIXED = compressed(4, 32)
MIXED.config["ignore"] = ["lm_head", "re:.*k_proj$"]
CASES: dict[str, tuple[Writer, Callable[[str], bool]]] = {
    "gptq-4-ordered": (WRITERS["gptq-4-ordered"], lambda name: False),
    "fp8-block": (WRITERS["fp8-block"], lambda name: False),
    "modelopt-nvfp4": (WRITERS["modelopt-nvfp4"], lambda name: False),
    "plain keys beside int4": (MIXED, lambda name: name.endswith("k_proj")),
}
IN_SHORT = ("fp8-block", "plain keys beside int4")


def load(folder: Path, **options: Any) -> Decoder:
    info = read_model_info(folder)
    return load_model(info, torch.float32, DEVICE, lambda note: None, longest=256, **options)


def in_form(model: Decoder) -> DenseModel:
    config = dense_config(model.specification)
    assert isinstance(config, DenseConfig)
    return dense_model(config, model.specification, model.weights)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, marks=[] if ON_GPU or name in IN_SHORT else pytest.mark.slow)
        for name in CASES
    ],
)
def test_tokens_are_those_of_the_dequantized_weights(
    case: str, tiny_folder: Folder, tmp_path: Path
) -> None:
    writer, plain_names = CASES[case]
    quantized, plain = write_twins(tiny_folder("llama3-wide"), tmp_path, writer, plain_names)
    prompts, count = some_prompts([1, 20]), 2
    executor = dense_executor(*in_form(load(quantized)), SIZES)
    info = read_model_info(plain)
    reference = load_model(info, torch.float32, torch.device("cpu"), lambda note: None)
    wanted = PlanDriver(ModelExecutor(reference, SIZES), 1).run(prompts, count)
    assert PlanDriver(executor, 1).run(prompts, count) == wanted


@pytest.mark.parametrize(
    "kind", ["int4", *(pytest.param(each, marks=pytest.mark.slow) for each in ("int8", "fp8"))]
)
def test_tokens_of_words_are_those_of_the_dequantized_weights(
    kind: str, tiny_folder: Folder
) -> None:
    """Steps of few rows and of some; every kernel that they may need is launched at the start."""
    folder = tiny_folder("llama3-wide")
    model, reference = load(folder, online=kind), load(folder, online=kind)
    executor = dense_executor(*in_form(model), SIZES)
    reference.make_plain()
    assert words_of_products(reference.linears()) == ""
    if not ON_GPU:  # that computes fp32 by the kernel for any form
        assert executor.decoder.row_classes
        words = words_of_products(model.linears())
        assert "8 by kernels for words, 1 by the slower one" in words
        assert "multiples of 16 x 128 are taken" in words  # the LM head has 307 rows
    with torch.inference_mode():
        executor.graphs.run_padding(SIZES.max_num_seqs)
    prompts, count = some_prompts([1, 20]), 2
    wanted = PlanDriver(ModelExecutor(reference, SIZES), 1).run(prompts, count)
    assert PlanDriver(executor, 1).run(prompts, count) == wanted


def test_without_kernels_weights_become_plain(tiny_folder: Folder, tmp_path: Path) -> None:
    writer, plain_names = CASES["plain keys beside int4"]
    quantized, plain = write_twins(tiny_folder("llama3-wide"), tmp_path, writer, plain_names)
    model, other = load(quantized), load(plain)
    before = model.weight_bytes
    model.make_plain()
    assert model.weight_bytes == other.weight_bytes > 2 * before
    ours, theirs = (each.weights.layers[0].linears.qkv for each in (model, other))
    x = torch.randn(3, 128).to(DEVICE)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-4)


def test_kernels_that_read_plain_weights_are_not_used(tiny_folder: Folder) -> None:
    weights = in_form(load(tiny_folder("llama3-wide"), online="int8")).weights
    assert most_fused_rows(weights.layers) == 0
    plain = in_form(load(tiny_folder("llama3-wide"))).weights
    assert most_fused_rows(plain.layers) > 0
    assert "quantized" not in why_never(plain)
