"""Sizes that ``penstock serve`` was not given, on a host with several GPUs: chosen by the plan; and
those that it was given: refused where the model cannot be divided so."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from penstock.protocol.config import Config, ConfigError, Provenance
from penstock.protocol.config.complete import complete
from penstock.protocol.config.machine import Machine
from penstock.protocol.config.sources import Source
from penstock.protocol.model_info import BadModelFolder

if TYPE_CHECKING:
    from penstock.services.worker.layouts.choice import Choice
    from penstock.services.worker.rank_choice import StageLayers

SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
GIVE_SIZES = "--tensor-parallel-size, --pipeline-parallel-size and --data-parallel-size use more"

Settings = tuple[Config, Provenance]


def with_layout(
    resolved: Settings, completed: Settings, machine: Machine, *, one_engine: bool = False
) -> tuple[Settings, str]:
    """The settings with the sizes of the best layout of this host's GPUs where none was given, and
    a line that says which and why; empty where there was nothing to choose.

    resolved: as given, for one model; completed: the same, made whole. Sizes that were given are
    left as they are, but refused with the numbers where the model does not fit so. one_engine: no
    more than that is wanted, on the fewest GPUs. Raises ``ConfigError`` and ``BadModelFolder``.
    """
    config, sources = completed
    launch = config.launch
    on_this_host = launch.nodes == 1 and launch.executor == "process" and not launch.join
    is_here = os.path.isdir(config.model.model)  # --show-config may name one that is not
    several = machine.gpus - config.device.device_index > 1
    if config.device.device != "cuda" or not (several and on_this_host and is_here):
        return completed, ""
    from penstock.services.worker.cuda_driver import read_devices_in_time
    from penstock.services.worker.layouts.choice import choose_layout, refuse_impossible
    from penstock.services.worker.layouts.given_gpus import gpus_of

    devices = read_devices_in_time()[config.device.device_index :]
    is_given = any(sources[name].origin != "default" for name in SIZES)
    if len(devices) < 2 or config.num_workers > len(devices):
        return completed, ""
    one = f"one GPU of {len(devices)} is used"
    if not is_given and launch.model_dirs:
        # Each model that is loaded later wants a device of its own.
        return completed, f"{one}: --model-dirs leaves the others to models that are loaded later"
    if reason := _undivided(config):
        line = f"{one}: {reason}; --data-parallel-size starts an engine on each"
        return completed, "" if is_given else line
    try:
        gpus = gpus_of(devices, "a plan for the GPUs of this host")
    except ConfigError as unknown:
        return completed, "" if is_given else f"{one} ({unknown}); {GIVE_SIZES}"
    if is_given:
        return _with_stages(completed, refuse_impossible(config, gpus)), ""
    choice = choose_layout(config, gpus, one_engine=one_engine)
    if isinstance(choice, str):
        return completed, f"{one}: {choice}; {GIVE_SIZES}"
    return _chosen(resolved, choice, machine), choice.reason


def check_sizes(configs: Sequence[Config]) -> None:
    """Refuse what the workers of these models would: a model that cannot be divided as the sizes
    say is known from its folder, before any process starts. Raises ``ConfigError`` and
    ``BadModelFolder``."""
    for config in configs:
        if config.cluster.world_size > 1 and config.device.device != "null":  # which has no weights
            from penstock.protocol.model_info import read_model_info
            from penstock.services.worker.rank_choice import check_division

            check_division(config, read_model_info(config.model.model))


def _chosen(resolved: Settings, choice: Choice, machine: Machine) -> Settings:
    config, sources = resolved
    sizes = choice.layout.sizes
    engines = sizes.pop("data_parallel_size")
    config = replace(
        config,
        cluster=replace(config.cluster, **sizes),
        launch=replace(config.launch, data_parallel_size=engines),
    )
    chosen = Source("derived", f"penstock plan: {choice.reason}")
    sources = sources | dict.fromkeys(SIZES, chosen)
    completed = complete(config, sources, machine, may_lack_model=False)
    return _with_stages(completed, choice.stages)


def _with_stages(completed: Settings, stages: StageLayers) -> Settings:
    """With the layers of each stage where ``--pipeline-layers balanced`` was given, so that all
    ranks have those that fit on these GPUs."""
    config, sources = completed
    if config.cluster.pipeline_layers != "balanced" or not stages.counts:
        return completed
    layers = ",".join(map(str, stages.counts))
    cluster = replace(config.cluster, pipeline_layers=layers)
    derived = Source("derived", stages.reason)
    return replace(config, cluster=cluster), sources | {"pipeline_layers": derived}


def _undivided(config: Config) -> str:
    """Why a plan does not decide how this model is divided; empty: it does."""
    if config.loading.lora or config.launch.lora_dirs:
        return "adapters on GPUs are for models on one device"
    from penstock.protocol.model_info import read_model_info
    from penstock.protocol.pooling import read_pooling

    try:
        pooling = read_pooling(read_model_info(config.model.model), config.model)
    except (BadModelFolder, ConfigError):
        return ""  # the plan says what is wrong with it
    return "plans are for decoders, and this is an encoder" if pooling.encoder else ""
