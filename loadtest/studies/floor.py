"""What a model's work needs at least on a GPU, in bf16 and without any overhead.

    python -m penstock.loadtest.studies.floor FOLDER … --terabytes 3.0 --teraflops 770

Prints decode steps of batches with 128 tokens in and 256 out, and the throughput of the 256
requests of ``penstock bench throughput``: weights are read once a step, each byte of the KV cache
once for each token behind it, and products run at the given rate.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.loadtest.offline.offline_requests import draw_requests
from penstock.loadtest.options import number
from penstock.loadtest.reports import report
from penstock.loadtest.roofline.decoder_cost import (
    attention_flops,
    decoder_config,
    head_weights,
    layer_weights,
    weight_bytes,
)
from penstock.loadtest.roofline.device_limits import DeviceLimits
from penstock.protocol.model_info import BadModelFolder, read_model_info
from penstock.services.worker.models.dense import DenseConfig

ITEM = 2
"""Bytes of a number."""
BATCHES, INPUT, OUTPUT = (1, 8, 64), 128, 256
WRONG_SETTINGS = 2


def step_seconds(config: DenseConfig, limits: DeviceLimits, contexts: Sequence[int]) -> float:
    """One decode step of sequences with so many positions."""
    weights = layer_weights(config) + head_weights(config)
    products = limits.floor(weight_bytes(config, ITEM), 2 * weights * len(contexts))
    return products + sum(contexts) * position_bytes(config) / limits.bandwidth


def position_bytes(config: DenseConfig) -> int:
    """K and V of one position in all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * ITEM


def batch_seconds(config: DenseConfig, limits: DeviceLimits, size: int) -> float:
    """The middle decode step of a batch of equal requests."""
    return step_seconds(config, limits, [INPUT + OUTPUT // 2] * size)


def throughput(config: DenseConfig, limits: DeviceLimits) -> float:
    """Output tokens a second of 256 requests that begin together, prompts first."""
    requests = draw_requests(256, (100, 1024), (100, 1024), 0)
    inputs, outputs = [len(prompt) for prompt in requests.prompts], requests.output_lens
    operations = 2 * layer_weights(config) * sum(inputs)
    operations += config.num_layers * sum(attention_flops(config, 0, count) for count in inputs)
    seconds = operations / limits.flops
    for step in range(1, max(outputs)):
        pairs = zip(inputs, outputs, strict=True)
        contexts = [count + step for count, wanted in pairs if wanted > step]
        seconds += step_seconds(config, limits, contexts)
    return sum(outputs) / seconds


def main(arguments: Sequence[str]) -> int:
    """Run with these flags. Returns the exit code."""
    parser = argparse.ArgumentParser(
        "python -m penstock.loadtest.studies.floor", description=__doc__
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument(
        "--terabytes", type=number(0.001, 1000), required=True, metavar="X",
        help="that the device reads in a second",
    )  # fmt: skip
    parser.add_argument(
        "--teraflops", type=number(0.001, 100_000), required=True, metavar="X",
        help="of its products in bf16",
    )  # fmt: skip
    parsed = parser.parse_args(arguments)
    limits = DeviceLimits("given", parsed.terabytes * 1e12, parsed.teraflops * 1e12, "flags")
    rows = []
    for folder in parsed.folders:
        try:
            config = decoder_config(read_model_info(folder))
        except BadModelFolder as error:
            print(f"penstock: {error}", file=sys.stderr)
            return WRONG_SETTINGS
        row = {"model": folder.name, "rate": throughput(config, limits)}
        row |= {f"b{size}": 1e3 * batch_seconds(config, limits, size) for size in BATCHES}
        rows.append(row)
    columns = {"model": "model"} | {f"b{size}": f"ms, batch {size}" for size in BATCHES}
    print(report.table(columns | {"rate": "output tokens/s"}, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
