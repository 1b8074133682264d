"""Whether a model can be divided among the ranks of its engine. Needs no torch."""

from __future__ import annotations

from penstock.protocol.config import Config, ConfigError
from penstock.protocol.model_info import ModelInfo
from penstock.protocol.pooling import read_pooling
from penstock.services.worker.model_choice import choose_model
from penstock.services.worker.models.rank_shares import RankPlace, place_of, why_not
from penstock.services.worker.quantization.quantization import Quantization
from penstock.services.worker.quantization.reading import read_quantization


def rank_place(config: Config) -> RankPlace:
    """Where this worker stands among those of its engine. Raises ``ConfigError``."""
    cluster = config.cluster
    if cluster.rank >= cluster.world_size:
        raise ConfigError(
            f"--rank {cluster.rank}: an engine of {sizes(config)} has ranks 0 to "
            f"{cluster.world_size - 1}"
        )
    return place_of(cluster.rank, cluster.tensor_parallel_size, cluster.pipeline_parallel_size)


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
    quantization = read_quantization(info, config.model.quantization)
    if quantization is not None and cluster.tensor_parallel_size > 1:
        raise ConfigError(_quantized(config, info, quantization))
    reason = why_not(
        choice.specification, cluster.tensor_parallel_size, cluster.pipeline_parallel_size
    )
    if reason:
        raise ConfigError(f"{reason} ({info.folder})")


def _quantized(config: Config, info: ModelInfo, quantization: Quantization) -> str:
    """Why layers of quantized weights are not divided, with what to do instead."""
    size = f"--tensor-parallel-size {config.cluster.tensor_parallel_size}"
    stages = (
        f"--pipeline-parallel-size {config.cluster.world_size} divides the model by layers, and "
        "--data-parallel-size N starts N engines"
    )
    if quantization.online:
        return (
            f"{size} with --quantization {quantization.method}: layers of quantized weights are "
            f"not divided yet; leave one of them out: {stages}"
        )
    return (
        f"{size}: the weights of {info.folder} are quantized ({quantization.method}), and layers "
        f"of such weights are not divided yet; give the plain checkpoint, or leave it out: {stages}"
    )


def sizes(config: Config) -> str:
    """The flags that divide the model, as they were given."""
    cluster = config.cluster
    found = {
        "--tensor-parallel-size": cluster.tensor_parallel_size,
        "--pipeline-parallel-size": cluster.pipeline_parallel_size,
    }
    return " ".join(f"{flag} {size}" for flag, size in found.items() if size > 1)
