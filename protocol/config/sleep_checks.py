"""What models that sleep do not go together with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from penstock.protocol.config.fields import Config
from penstock.protocol.config.keep_alive import seconds_of
from penstock.protocol.config.process_fields import LaunchConfig
from penstock.protocol.config.sources import ConfigError


def contradictions_of_sleep(config: Config) -> Iterator[str]:
    """One line for each."""
    launch = config.launch
    if not launch.may_sleep:
        if launch.min_awake_s != LaunchConfig().min_awake_s:
            yield f"--min-awake-s {launch.min_awake_s:g} needs --resident: all models are awake"
        return
    flag = f"--keep-alive {' '.join(launch.keep_alive)}"
    if launch.resident is not None:
        flag = f"--resident {launch.resident}"
        yield from _resident(config, flag)
    yield from _keep_alive(config)
    yield from _sleep_level(config)
    refused = (
        (launch.model_dirs, "--model-dirs", "models that are loaded while the server runs"),
        (launch.lora_dirs, "--lora-dirs", "adapters that are loaded while the server runs"),
        (config.loading.lora, "--lora", "adapters, which a model that sleeps cannot name"),
        (launch.nodes > 1, f"--nodes {launch.nodes}", "an engine on several hosts"),
        (launch.join, "--join", "an engine on several hosts"),
        (launch.executor == "ray", "--executor ray", "an engine on several hosts"),
    )
    for given, other, what in refused:
        if given:
            yield f"{flag} and {other} do not go together: {what} cannot sleep yet"


def _resident(config: Config, flag: str) -> Iterator[str]:
    models, resident = config.model.models, config.launch.resident or 0
    if models and resident > len(models):
        yield f"{flag} is more than the {len(models)} models that there are"


def _sleep_level(config: Config) -> Iterator[str]:
    if config.launch.sleep_level == 2:
        return
    if config.device.device == "cpu":
        yield (
            "--sleep-level 1 takes weights off a GPU; with --device cpu they are in the host's "
            "memory anyway: leave it out"
        )
    elif config.device.device == "cuda" and not config.loading.hold_weights:
        yield (
            "--sleep-level 1 needs --hold-weights, with which weights are in memory that can be "
            "given back"
        )


def _keep_alive(config: Config) -> Iterator[str]:
    given, count = config.launch.keep_alive, max(1, len(config.model.models))
    if config.model.models and len(given) not in (0, 1, count):
        yield (
            f"--keep-alive {' '.join(given)}: {len(given)} times for {count} models; give one for "
            "all, or one for each in their order"
        )
    for text in given:
        try:
            seconds_of(text)
        except msgspec.ValidationError as error:
            yield f"--keep-alive {text}: {error}"


def check_sleep(command: str, configs: Sequence[Config]) -> None:
    """What only the whole server can tell: its processes hear a part of it. ``configs``: one of
    each model. Raises ``ConfigError``."""
    if command not in ("serve", "plan"):
        return
    launch = configs[0].launch
    if not launch.may_sleep and launch.sleep_level != LaunchConfig().sleep_level:
        raise ConfigError(
            f"--sleep-level {launch.sleep_level} needs --resident or --keep-alive: no model sleeps"
        )
    if not launch.may_sleep and launch.prepare_engines and not configs[0].loading.hold_weights:
        raise ConfigError(
            "--prepare-engines needs --resident or --keep-alive (no model sleeps), or "
            "--hold-weights"
        )
    resident = launch.resident
    if resident is not None and len(configs) == 1:
        raise ConfigError(
            f"--resident {resident} chooses among several models, and there is one; --keep-alive "
            "lets it sleep"
        )
