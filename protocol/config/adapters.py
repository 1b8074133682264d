"""``--lora``: how adapters are written, and what they cannot be combined with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

from msgspec import Meta

from penstock.protocol.config.fields import Config, LoadingConfig
from penstock.protocol.shown_values import show

MAX_NAME = 256
"""Characters of an adapter's name."""


AdapterName = Annotated[str, Meta(max_length=MAX_NAME)]


class NamedFolder(NamedTuple):
    name: str
    folder: Path


def named_folders(config: Config) -> list[NamedFolder]:
    """The adapters that a server begins with; of a configuration without contradictions."""
    pairs = (one.partition("=") for one in config.loading.lora)
    return [NamedFolder(name, Path(os.path.expanduser(path))) for name, _, path in pairs]


class AdapterLimits(NamedTuple):
    """How many adapters there may be."""

    places: int
    """On the device."""
    held: int
    """In the host's memory, those included."""
    loaded: int
    """In all; the others are read from disk again when they are wanted."""


def adapter_limits(loading: LoadingConfig) -> AdapterLimits:
    """Those of a configuration; what is not given is as the one before."""
    places, held, loaded = loading.max_loras, loading.max_cpu_loras, loading.max_registered_loras
    held = places if held is None else held
    return AdapterLimits(places, held, held if loaded is None else loaded)


def taken_names(config: Config) -> frozenset[str]:
    """Those that no adapter may have: the model's, and what clients may write for these, which is
    what stands behind their last ``/``."""
    names = config.model.names()
    return frozenset((*names, *(one.rpartition("/")[2] for one in names)))


def unfit_name(name: str) -> str:
    """Why an adapter cannot have a name, in words; empty: it can."""
    if not name:
        return "the name is empty"
    if len(name) > MAX_NAME:
        return f"the name has {len(name)} characters; at most {MAX_NAME} are allowed"
    if "=" in name:
        return "the name holds '=', which ends it in --lora NAME=FOLDER"
    return "" if name.isprintable() else "the name holds characters that cannot be printed"


def contradictions_of_adapters(config: Config) -> Iterator[str]:
    """One line for each way in which ``--lora`` cannot be followed."""
    given, launch = config.loading.lora, config.launch
    if not given and not launch.lora_dirs:
        return
    if launch.lora_dirs and (launch.nodes > 1 or launch.join or launch.executor != "process"):
        yield "--lora-dirs with several hosts: adapters are loaded on one host alone; use --lora"
    if launch.lora_dirs and launch.model_dirs:
        yield "--lora-dirs with --model-dirs: adapters belong to the one model of a server"
    yield from _of_names(config)
    yield from _of_counts(config)
    yield from _of_models(config, "--lora" if given else "--lora-dirs")


def _of_names(config: Config) -> Iterator[str]:
    names: set[str] = set()
    for one in config.loading.lora:
        name, equals, path = one.partition("=")
        if reason := unfit_name(name) if equals and path else "it is not NAME=FOLDER":
            yield f"--lora {show(one)}: {reason}"
        if name in names or (not config.model.models and name in taken_names(config)):
            yield f"--lora {show(one)}: the name {show(name)} is taken; choose another one"
        names.add(name)


def _of_counts(config: Config) -> Iterator[str]:
    loading, given = config.loading, len(config.loading.lora)
    limits = adapter_limits(loading)
    if limits.held < limits.places:
        yield (
            f"--max-cpu-loras {limits.held} is less than --max-loras {limits.places}: an adapter "
            "on the device is in the host's memory, too"
        )
    if limits.loaded < limits.held:
        yield (
            f"--max-registered-loras {limits.loaded} is less than --max-cpu-loras {limits.held}: "
            "an adapter in the host's memory is one of those that are served"
        )
    if given > limits.loaded and loading.lora_required:
        yield (
            f"--lora is given {given} times, more than --max-registered-loras "
            f"{limits.loaded} (which is --max-cpu-loras, and that --max-loras {limits.places}, "
            "unless they are given)"
        )


def _of_models(config: Config, flag: str) -> Iterator[str]:
    """Models that have no adapters, and places where they have none."""
    if len(config.model.models) > 1:
        yield (
            f"{flag} with {len(config.model.models)} models: adapters belong to one model; serve "
            "the others by a server of their own"
        )
    if config.device.device == "null":
        yield f"{flag} with --device null: the null engine has no model to adapt"
    if config.device.device == "cuda" and config.cluster.world_size > 1:
        yield (
            f"{flag} with --device cuda and {config.cluster.world_size} devices for a model: on "
            "GPUs adapters are for models on one; --data-parallel-size uses more"
        )
    if config.device.device == "cuda" and config.speculation.drafts:
        yield (
            f"{flag} with --device cuda and --speculative {config.speculation.speculative}: on "
            "GPUs rows with adapters have no drafts; use --speculative off"
        )
    if config.model.model_impl == "transformers":
        yield f"{flag} with --model-impl transformers: adapters are for families of our own"
    if config.model.task not in ("auto", "generate") or config.model.pooling != "auto":
        yield f"{flag} with --task or --pooling: adapters are for models that generate alone"
