"""A resolved configuration made whole: for one model, on one machine."""

from __future__ import annotations

import os

import msgspec

from penstock.protocol.config.checks import contradictions
from penstock.protocol.config.derive import derive
from penstock.protocol.config.fields import Config
from penstock.protocol.config.machine import Machine, this_machine
from penstock.protocol.config.sources import ConfigError, Provenance, Source


def complete(
    config: Config, sources: Provenance, machine: Machine | None = None, *, may_lack_model: bool
) -> tuple[Config, Provenance]:
    """Derive what was left out from the model and the machine (this one, unless another is given);
    check the whole once more.

    Raises ``ConfigError`` and ``BadModelFolder``.
    """
    from penstock.protocol.model_info import read_model_info

    machine = machine or this_machine()
    folder = config.model.model
    known = folder and not (may_lack_model and not os.path.isdir(folder))
    info = read_model_info(folder) if known else None
    config, sources = derive(config, sources, machine, info)
    if faults := contradictions(config, sources, machine, info):
        raise ConfigError("\n".join(faults))
    return config, sources


class AnotherModel(msgspec.Struct, frozen=True):
    """A model that joins those that a server was started with."""

    folder: str
    name: str = ""
    """Under which it is served; empty: its folder's."""
    memory_share: float = 0.0
    """See ``CacheConfig``; 0: nobody has said one."""


def with_another_model(
    config: Config, sources: Provenance, another: AnotherModel, running: list[Config]
) -> Config:
    """The configuration of one more model, as ``serve`` would have made it, beside those of the
    models that run. ``config``, ``sources``: as resolved at the start.

    Raises ``ConfigError`` and ``BadModelFolder``.
    """
    given = Source("derived", "asked for when the model was loaded")
    names = [another.name] if another.name else []
    shares = [another.memory_share] if another.memory_share else []
    model = msgspec.structs.replace(
        config.model, model=another.folder, models=[], served_model_name=names
    )
    sources = sources | {
        "model": given,
        "served_model_name": given if names else Source("default"),
        "lora": Source("default"),
        "memory_share": Source("request" if shares else "default"),
    }
    cache = msgspec.structs.replace(config.cache, memory_share=shares)
    loading = msgspec.structs.replace(config.loading, lora=[])  # those are another model's
    config = msgspec.structs.replace(config, model=model, cache=cache, loading=loading)
    machine = this_machine()
    config, _ = complete(config, sources, machine, may_lack_model=False)
    return _beside(config, running, machine.gpus) if config.device.device == "cuda" else config


def _beside(config: Config, running: list[Config], devices: int) -> Config:
    """On devices of its own where some are free, and else with what is left of the memory of those
    that it shares. Raises ``ConfigError``."""
    count, first = config.num_workers, config.device.device_index
    taken = {at for one in running for at in _devices_of(one)}
    for index in range(first, devices - count + 1):
        if not config.cache.memory_share and taken.isdisjoint(range(index, index + count)):
            device = msgspec.structs.replace(config.device, device_index=index)
            return msgspec.structs.replace(config, device=device)
    if config.cache.num_kv_blocks or config.cache.kv_cache_memory_bytes:
        return config
    own = _devices_of(config)
    used = max(sum(one.cache.share() for one in running if at in _devices_of(one)) for at in own)
    share = config.cache.share() if config.cache.memory_share else 1.0 - used
    if used + share > 1.0 + 1e-6 or share < _LEAST_SHARE:
        raise ConfigError(
            f"the models that run have {used:g} of the memory of a device (--memory-share), and "
            f"{share if config.cache.memory_share else _LEAST_SHARE:g} more is wanted: unload one, "
            "or start the server with smaller shares"
        )
    cache = msgspec.structs.replace(config.cache, memory_share=[share])
    return msgspec.structs.replace(config, cache=cache)


_LEAST_SHARE = 0.01


def _devices_of(config: Config) -> range:
    first = config.device.device_index
    return range(first, first + config.num_workers)
