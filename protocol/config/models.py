"""Several models in one configuration: how they are written, and the configuration of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from penstock.protocol.config.fields import Config
from penstock.protocol.config.sources import ConfigError, Provenance, Source


def models_in(raw: Any, *, separated: bool) -> list[str]:
    """The models that a source names: one, or a list of them.

    ``separated``: a text is separated by commas, or a JSON array where a name holds a comma, as in
    an environment variable. Raises ``msgspec.ValidationError``.
    """
    if isinstance(raw, str) and separated:
        if raw.startswith("["):
            try:
                return msgspec.json.decode(raw, type=list[str])
            except msgspec.DecodeError:
                raise msgspec.ValidationError("Expected a JSON array of strings") from None
        return [part for part in raw.split(",") if part]
    return msgspec.convert([raw] if isinstance(raw, str) else raw, list[str])


def written(model: str) -> str:
    """One model as an environment variable holds it."""
    return msgspec.json.encode([model]).decode() if "," in model or model[:1] == "[" else model


def contradictions_of_several(config: Config) -> Iterator[str]:
    """What must be given once for each model."""
    models, names, shares = config.model.models, config.model.served_model_name, _shares(config)
    count = max(1, len(models))
    if models and names and len(names) != count:
        yield (
            f"--served-model-name {' '.join(names)}: {_number(len(names), 'name')} for {count} "
            f"models ({', '.join(models)}); several models take one each, in their order"
        )
    if shares and len(shares) != count:
        yield (
            f"--memory-share {_listed(shares)}: {_number(len(shares), 'share')} for "
            f"{_number(count, 'model')}; give one for each, in their order"
        )
    elif (total := sum(sorted(shares, reverse=True)[: config.launch.resident])) > 1.0 + 1e-6:
        awake = f" {config.launch.resident} of" if config.launch.resident else ""
        yield (
            f"--memory-share {_listed(shares)}: together {total:g}, but{awake} the models share "
            "one memory, which is 1"
        )


def several_refused(models: Sequence[str], where: str) -> str:
    """The message of a process that has one model."""
    return (
        f"{where} names {len(models)} models ({', '.join(models)}), but this takes one; only "
        "`penstock serve` starts several"
    )


def of_each(
    config: Config, sources: Provenance, *, devices: int = 0
) -> list[tuple[Config, Provenance]]:
    """One configuration for each model. ``devices``: CUDA devices of this machine.

    The models share memory in equal parts, unless told otherwise, or unless there are so many
    devices that each engine has one of its own. Where only some are awake at a time, these share
    it, and their engines are on the same devices.
    """
    models = config.model.models
    if not models:
        return [(config, sources)]
    each = config.num_workers
    enough = config.device.device_index + len(models) * each <= devices
    apart = enough and config.device.device in ("auto", "cuda") and not _shares(config)
    apart = apart and config.launch.resident is None
    found = []
    for place, model in enumerate(models):
        names = config.model.served_model_name[place : place + 1]
        changed = msgspec.structs.replace(
            config.model, model=model, models=[], served_model_name=names
        )
        cache, own_sources = _memory_of(config, sources, place, alone=apart)
        device = config.device
        if apart:
            first = device.device_index + place * each
            device = msgspec.structs.replace(device, device_index=first)
        one = msgspec.structs.replace(config, model=changed, cache=cache, device=device)
        found.append((one, own_sources))
    return found


def _memory_of(config: Config, sources: Provenance, place: int, *, alone: bool) -> tuple[Any, Any]:
    """The cache settings of the model at a place, and where they come from."""
    cache, count = config.cache, config.launch.resident or len(config.model.models)
    sized = cache.num_kv_blocks or cache.kv_cache_memory_bytes or config.device.device == "null"
    if cache.memory_share:
        share = [cache.memory_share[place]]
        return msgspec.structs.replace(cache, memory_share=share), dict(sources)
    if sized or alone:
        return cache, dict(sources)
    awake = " that are awake" if config.launch.resident else ""
    source = Source("derived", f"an equal part for each of {count} models" + awake)
    cache = msgspec.structs.replace(cache, memory_share=[1.0 / count])
    return cache, sources | {"memory_share": source}


def together(
    config: Config, sources: Provenance, found: Sequence[tuple[Config, Provenance]]
) -> tuple[Config, Provenance]:
    """What ``of_each`` has made of a configuration as one again, to be shown."""
    if len(found) == 1:
        return found[0]
    configs = [one for one, _ in found]
    origins = {name: found[0][1][name] for name in ("served_model_name", "memory_share")}
    model = msgspec.structs.replace(
        config.model,
        models=[one.model.model for one in configs],
        served_model_name=[one.model.names()[0] for one in configs],
    )
    shares = [share for one in configs for share in one.cache.memory_share]
    cache = msgspec.structs.replace(config.cache, memory_share=shares)
    return msgspec.structs.replace(config, model=model, cache=cache), sources | origins


def check_names(configs: Sequence[Config]) -> None:
    """Raises ``ConfigError`` where two models have one name."""
    known: dict[str, str] = {}
    for config in configs:
        name, folder = config.model.names()[0], config.model.model
        if name in known:
            raise ConfigError(
                f"two models have the name {name!r}: {known[name]} and {folder}; give each a name "
                "of its own with --served-model-name, once for each model in their order"
            )
        known[name] = folder


def _shares(config: Config) -> list[float]:
    return config.cache.memory_share


def _listed(shares: Sequence[float]) -> str:
    return " ".join(f"{share:g}" for share in shares)


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
