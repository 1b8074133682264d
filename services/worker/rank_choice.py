"""Whether a model can be divided among the ranks of its engine. Needs no torch."""

from __future__ import annotations

from typing import NamedTuple

from penstock.protocol.config import Config, ConfigError
from penstock.protocol.config.division import given_layers, why_not_layers
from penstock.protocol.model_info import ModelInfo
from penstock.protocol.pooling import read_pooling
from penstock.services.worker.model_choice import choose_model
from penstock.services.worker.models.linear_shares import why_not_divided
from penstock.services.worker.models.linear_specification import model_linears
from penstock.services.worker.models.rank_shares import RankPlace, own_model, place_of, why_not
from penstock.services.worker.models.registry import adapter_for
from penstock.services.worker.models.specification import ModelSpecification
from penstock.services.worker.models.stage_costs import LayerCosts, balanced, layer_costs
from penstock.services.worker.models.stage_division import even, stage_sums
from penstock.services.worker.quantization.reading import read_quantization


class StageLayers(NamedTuple):
    counts: tuple[int, ...]
    """Of each stage; empty where there is one stage."""
    reason: str = ""


def rank_place(config: Config, info: ModelInfo) -> RankPlace:
    """Where this worker stands among those of its engine. Raises ``ConfigError`` and
    ``BadModelFolder``."""
    cluster = config.cluster
    if cluster.rank >= cluster.world_size:
        raise ConfigError(
            f"--rank {cluster.rank}: an engine of {sizes(config)} has ranks 0 to "
            f"{cluster.world_size - 1}"
        )
    tensor, pipeline = cluster.tensor_parallel_size, cluster.pipeline_parallel_size
    return place_of(cluster.rank, tensor, pipeline, stage_layers(config, info).counts)


def stage_layers(config: Config, info: ModelInfo) -> StageLayers:
    """Layers of the stages, and why, by what all ranks know alike: the settings and the model's
    ``config.json``. ``check_division`` must have found nothing. Raises ``BadModelFolder``."""
    cluster = config.cluster
    stages = cluster.pipeline_parallel_size
    model = choose_model(info, config).specification if stages > 1 else None
    if model is None:
        return StageLayers(())
    if counts := given_layers(cluster):
        return StageLayers(counts, "as --pipeline-layers says")
    rule = cluster.pipeline_layers
    if rule == "even" or (rule == "auto" and config.device.device != "cpu"):
        return StageLayers(even(len(model.layers), stages), "equally many, the first stages more")
    costs = costs_of(config, info, model)
    counts = balanced(costs, stages)
    return StageLayers(counts, words_of_bytes(costs, counts))


def costs_of(config: Config, info: ModelInfo, model: ModelSpecification) -> LayerCosts:
    """Plain numbers count as 16 bits, whatever the type that a host's processor is best with, so
    that ranks of different hosts find the same. Raises ``BadModelFolder``."""
    quantization = read_quantization(info, config.model.quantization)
    return layer_costs(model, 2, quantization, adapter_for(info).names)


def words_of_stage(config: Config, info: ModelInfo) -> str:
    """For a line at the start; empty where there is one stage."""
    counts, reason = stage_layers(config, info)
    if not counts:
        return ""
    own = rank_place(config, info)
    layers = own.layers(sum(counts))
    return (
        f"; layers {layers.start} to {layers.stop - 1}, stage {own.stage + 1} of {own.stages} with "
        f"{', '.join(map(str, counts))} layers ({reason})"
    )


def words_of_bytes(costs: LayerCosts, counts: tuple[int, ...]) -> str:
    """Why stages have these layers."""
    read = stage_sums(costs.layers, counts, costs.last)
    shares = ", ".join(f"{each / sum(read):.1%}" for each in read)
    return (
        f"balanced: a decode step reads {shares} of the bytes in them, LM head and logits "
        f"({costs.last / sum(read):.1%}) in the last"
    )


def check_division(config: Config, info: ModelInfo) -> None:
    """Raises ``ConfigError`` that says why the model cannot be divided as the configuration says,
    and ``BadModelFolder``."""
    cluster = config.cluster
    if cluster.world_size == 1:
        return
    pooling, name = read_pooling(info, config.model), info.architecture
    if pooling.encoder:
        raise ConfigError(
            f"{sizes(config)}: {name} is an encoder, which one device computes; "
            "--data-parallel-size N starts N of it"
        )
    if pooling.is_judge:
        raise ConfigError(
            f"{sizes(config)}: {name} is asked to judge, which one device does; "
            "--data-parallel-size N starts N of it"
        )
    choice = choose_model(info, config)
    if choice.specification is None:
        because = f" ({choice.refusal})" if choice.refusal else ""
        raise ConfigError(
            f"{sizes(config)}: transformers' code computes {name}{because}, and only families of "
            "our own can be divided; --data-parallel-size N starts N engines"
        )
    reason = why_not(
        choice.specification, cluster.tensor_parallel_size, cluster.pipeline_parallel_size
    )
    reason = reason or why_not_layers(cluster, len(choice.specification.layers))
    reason = reason or _why_not_quantized(config, info, choice.specification)
    if reason:
        raise ConfigError(f"{reason} ({info.folder})")


def _why_not_quantized(config: Config, info: ModelInfo, model: ModelSpecification) -> str:
    """Why quantized weights cannot be divided so, with what can; empty if they can."""
    cluster, quantization = config.cluster, read_quantization(info, config.model.quantization)
    if quantization is None or cluster.tensor_parallel_size == 1:
        return ""
    place, names = RankPlace(0, cluster.tensor_parallel_size), adapter_for(info).names
    whole = model_linears(model, names, quantization)
    own = model_linears(own_model(model, place), names, quantization)
    for layer, part in zip(whole.layers, own.layers, strict=True):
        for of_all, linear in zip(layer, part, strict=True):
            if reason := why_not_divided(of_all, linear):
                return (
                    f"--tensor-parallel-size {cluster.tensor_parallel_size} divides no quantized "
                    f"weights like these: {reason}; --pipeline-parallel-size {cluster.world_size} "
                    "divides the model by layers"
                )
    return ""


def sizes(config: Config) -> str:
    """The flags that divide the model, as they were given."""
    cluster = config.cluster
    found = {
        "--tensor-parallel-size": cluster.tensor_parallel_size,
        "--pipeline-parallel-size": cluster.pipeline_parallel_size,
    }
    return " ".join(f"{flag} {size}" for flag, size in found.items() if size > 1)
