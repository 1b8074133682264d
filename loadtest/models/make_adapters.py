"""Make LoRA adapters with random weights for a model of Llama's kind: PEFT folders.

``python -m penstock.loadtest.models.make_adapters MODEL FOLDER --count 64 --rank 16`` writes
``FOLDER/a0`` to ``FOLDER/a63`` and prints the flags that load them. They share one file of weights
by hard links and differ in their scale, so that many take the disk of one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.loadtest.models.random_weights import write_weights
from penstock.loadtest.options import integer

_WEIGHTS = "adapter_model.safetensors"


def linear_sizes(model: Path) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the linear layers of a checkpoint, by their names."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    hidden, width = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    dim = config.get("head_dim") or hidden // heads
    queries, keys = heads * dim, config.get("num_key_value_heads", heads) * dim
    sizes = {
        "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (width, hidden), "mlp.up_proj": (width, hidden),
        "mlp.down_proj": (hidden, width),
    }  # fmt: skip
    layers = range(config["num_hidden_layers"])
    return {f"model.layers.{at}.{name}": size for at in layers for name, size in sizes.items()}


def make_adapters(model: Path, folder: Path, count: int, rank: int) -> list[Path]:
    """Write ``count`` adapters for all linear layers; returns their folders."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (outputs, inputs) in linear_sizes(model).items():
        prefix = f"base_model.model.{name}.lora_"
        shapes |= {f"{prefix}A.weight": (rank, inputs), f"{prefix}B.weight": (outputs, rank)}
    found = [folder / f"a{number}" for number in range(count)]
    for number, one in enumerate(found):
        one.mkdir(parents=True)
        if number:
            os.link(found[0] / _WEIGHTS, one / _WEIGHTS)
        else:
            write_weights(one, shapes, "bfloat16", 1, 0)
            (one / "model.safetensors").rename(one / _WEIGHTS)
        alpha = rank * (1 + number / count)
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha}
        (one / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Make LoRA adapters with random weights.")
    parser.add_argument("model", type=Path, help="folder with a config.json")
    parser.add_argument("folder", type=Path, help="where their folders are made")
    parser.add_argument("--count", type=integer(1, 10_000), default=64, metavar="N")
    parser.add_argument("--rank", type=integer(1, 512), default=16, metavar="N")
    parsed = parser.parse_args(arguments)
    found = make_adapters(parsed.model, parsed.folder, parsed.count, parsed.rank)
    print(" ".join(f"--lora {one.name}={one}" for one in found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
