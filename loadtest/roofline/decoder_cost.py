"""What a decoder's work costs at least: operations, and bytes that must be read."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.protocol.model_info import BadModelFolder, ModelInfo
from penstock.services.worker.models.dense import DenseConfig, dimensions, specification_of
from penstock.services.worker.models.linear_specification import layer_linears
from penstock.services.worker.models.registry import own_specification


def decoder_config(info: ModelInfo) -> DenseConfig:
    """Raises ``BadModelFolder`` for a model whose cost is not known here."""
    config = dimensions(own_specification(info))
    if isinstance(config, str):
        raise BadModelFolder(
            f"{info.folder / 'config.json'}: only the cost of models whose layers are alike, as in "
            f"Llama and Qwen, is known; this one differs in: {config}"
        )
    return config


def linear_shapes(config: DenseConfig) -> dict[str, tuple[int, int]]:
    """The products of a layer: [out, in] of each weight."""
    linears = layer_linears(specification_of(config).layers[0], config.hidden_size)
    names = ("qkv", "output", "gate_up", "down")
    return {name: (one.outputs, one.inputs) for name, one in zip(names, linears, strict=True)}


def layer_weights(config: DenseConfig) -> int:
    """Numbers in the linear weights of all layers."""
    return config.num_layers * sum(out * width for out, width in linear_shapes(config).values())


def head_weights(config: DenseConfig) -> int:
    return config.vocab_size * config.hidden_size


def attention_pairs(start: int, count: int, window: int = 0) -> int:
    """Pairs of query and key of ``count`` positions from ``start`` on: each sees up to its own, or
    the last ``window`` of these."""
    whole = min(count, max(0, window - start)) if window else count
    return whole * start + whole * (whole + 1) // 2 + (count - whole) * window


def attention_flops(config: DenseConfig, start: int, count: int, window: int = 0) -> int:
    """Operations of one layer's attention: 4 D for each pair of query and key and each head."""
    return 4 * config.num_heads * config.head_dim * attention_pairs(start, count, window)


def prefill_flops(config: DenseConfig, prompts: Iterable[tuple[int, int]]) -> int:
    """Operations that compute prompts; each (tokens in the cache, tokens to compute) and one row
    of logits."""
    total = 0
    for start, count in prompts:
        total += 2 * count * layer_weights(config) + 2 * head_weights(config)
        total += config.num_layers * attention_flops(config, start, count)
    return total


def weight_bytes(config: DenseConfig, itemsize: int) -> int:
    """What every step reads at least: the layers' weights and the LM head."""
    return (layer_weights(config) + head_weights(config)) * itemsize
