"""Whether a model can be divided among the workers of an engine, as far as its folder shows."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.protocol.config.process_fields import ClusterConfig
from penstock.protocol.model_info import ModelInfo


def given_layers(cluster: ClusterConfig) -> tuple[int, ...]:
    """Of each stage, as ``--pipeline-layers`` lists them; empty: it names a rule."""
    text = cluster.pipeline_layers
    return tuple(map(int, text.split(","))) if text[:1].isdigit() else ()


def why_not_layers(cluster: ClusterConfig, layers: int) -> str:
    """Why a model of so many layers is not divided as ``--pipeline-layers`` lists them, with the
    numbers; empty if it can be."""
    counts, stages = given_layers(cluster), cluster.pipeline_parallel_size
    if not counts:
        return ""
    flag = f"--pipeline-layers {cluster.pipeline_layers}"
    if len(counts) != stages:
        return (
            f"{flag} lists {len(counts)} stages, and --pipeline-parallel-size is {stages}; give "
            "the layers of each stage, or leave it out"
        )
    if not all(counts):
        return f"{flag}: each stage has one layer at least; give fewer stages"
    if sum(counts) != layers:
        return f"{flag}: together {sum(counts)} layers, and the model has {layers}"
    return ""


def contradictions_of_division(cluster: ClusterConfig, info: ModelInfo) -> Iterator[str]:
    """What ``config.json`` alone shows; the worker knows more of its families."""
    layers = info.config.get("num_hidden_layers")
    if type(layers) is int and cluster.pipeline_parallel_size > layers > 0:
        yield (
            f"--pipeline-parallel-size {cluster.pipeline_parallel_size}: the model has {layers} "
            f"layers; at most {layers} stages work"
        )
    elif type(layers) is int and (reason := why_not_layers(cluster, layers)):
        yield reason
    heads = info.config.get("num_attention_heads")
    kv_heads = info.config.get("num_key_value_heads") or heads
    if type(heads) is not int or type(kv_heads) is not int or not heads >= kv_heads > 0:
        return
    width = info.config.get("intermediate_size")

    def divides(size: int) -> bool:
        columns = width if type(width) is int else 0
        shared = not kv_heads % size or not size % kv_heads
        return not heads % size and shared and not columns % size

    if not divides(size := cluster.tensor_parallel_size):
        sizes = ", ".join(str(each) for each in range(1, heads + 1) if divides(each))
        yield (
            f"--tensor-parallel-size {size} does not divide the model's {heads} attention heads, "
            f"{kv_heads} KV heads and MLP of {width} columns; sizes that work: {sizes}"
        )
