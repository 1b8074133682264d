"""The processes of a server, made from its configuration; none is started here."""

from __future__ import annotations

import functools
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from penstock.protocol.config import Config
from penstock.protocol.config.terminal import style_of
from penstock.protocol.process import logs
from penstock.protocol.process.console import rendered
from penstock.services.launcher.environment import child_environment
from penstock.services.launcher.processes import Child

EXPECTED_MODELS = "PENSTOCK_EXPECTED_MODELS"
"""The variable by which frontends hear of the models that the server was started with."""


class ModelChildren(NamedTuple):
    """The processes of one model."""

    engines: list[Child]
    """Workers and schedulers."""
    tokenizers: list[Child]

    @property
    def all(self) -> list[Child]:
        return [*self.engines, *self.tokenizers]


class ServerChildren(NamedTuple):
    """The processes of a server."""

    router: Child
    models: list[ModelChildren]
    """In the order of the configurations."""
    frontends: list[Child]
    keepers: list[Child]
    """One where KV blocks are kept outside of the engines' memory."""
    holders: Sequence[Child] = ()
    """One where weights outlive their workers."""

    @property
    def without_engines(self) -> list[Child]:
        tokenizers = [child for model in self.models for child in model.tokenizers]
        return [self.router, *tokenizers, *self.frontends]

    @property
    def all(self) -> list[Child]:
        """In the order to start them: behind the router each engine's worker, which takes
        longest."""
        engines = [child for model in self.models for child in model.engines]
        tokenizers = [child for model in self.models for child in model.tokenizers]
        return [self.router, *self.keepers, *self.holders, *engines, *tokenizers, *self.frontends]


def make_children(
    configs: Sequence[Config], listener: socket.socket | None, inherited: Mapping[str, str]
) -> ServerChildren:
    """One child for each process of the server, none started yet.

    One of ``configs`` for each model. Engines and tokenizers are numbered through all of them.
    Without a ``listener`` there are no frontends.
    """
    config = configs[0]
    shared = _environment(config, inherited)
    router = _router_environment(shared, config)
    several = len(configs) > 1 or bool(config.launch.model_dirs)
    models = [
        children_of_model(one, inherited, place, named=several) for place, one in enumerate(configs)
    ]
    if several:
        shared[EXPECTED_MODELS] = expected([one.model.names()[0] for one in configs])
    render = rendering(config)
    frontends = [
        Child("frontend", number, shared, listener.fileno(), render=render)
        for number in range(config.launch.frontends)
        if listener is not None
    ]
    keepers = [
        Child("keeper", 0, shared, only_one=True, render=render)
        for _ in range(config.cache.has_tiers)
    ]
    holders = [
        Child("holder", 0, shared, only_one=True, render=render)
        for _ in range(config.loading.hold_weights)
    ]
    first = Child("router", 0, router, only_one=True, render=render)
    return ServerChildren(first, models, frontends, keepers, holders)


def children_of_model(
    config: Config, inherited: Mapping[str, str], place: int, *, named: bool
) -> ModelChildren:
    """The processes of a model. ``place``: how many models the server has had before it, by which
    they are numbered; ``named``: they are told apart by the model's name."""
    own, render = _environment(config, inherited), rendering(config)
    of = config.model.names()[0] if named else ""
    engines = []
    for number in range(config.launch.data_parallel_size):
        engine = place * config.launch.data_parallel_size + number
        scheduler = {**own, "PENSTOCK_ENGINE": str(engine)}
        if prefill := config.launch.prefill_engines:
            scheduler["PENSTOCK_ROLE"] = "prefill" if number < prefill else "decode"
        world = config.cluster.world_size
        for rank in range(world):
            ranked = scheduler if world == 1 else {**scheduler, "PENSTOCK_RANK": str(rank)}
            if config.device.device == "cuda":
                device = config.device.device_index + number * world + rank
                ranked = {**ranked, "PENSTOCK_DEVICE_INDEX": str(device)}
            rank_number = engine * world + rank
            engines.append(Child("worker", rank_number, ranked, model=of, render=render))
        engines.append(Child("scheduler", engine, scheduler, model=of, render=render))
    first = place * config.launch.tokenizers
    tokenizers = [
        Child("tokenizer", first + number, own, model=of, render=render)
        for number in range(config.launch.tokenizers)
    ]
    return ModelChildren(engines, tokenizers)


def expected(models: Sequence[str]) -> str:
    """Models as the value of ``EXPECTED_MODELS``."""
    return json.dumps(list(models))


def rendering(config: Config) -> Callable[[bytes, str], bytes] | None:
    people = logs.for_people(config.observability.log_format)
    return functools.partial(rendered, style=style_of(2)) if people else None


def _environment(config: Config, inherited: Mapping[str, str]) -> dict[str, str]:
    # For people the launcher renders all lines alike.
    return {**child_environment(config, inherited), "PENSTOCK_LOG_FORMAT": "json"}


def _router_environment(shared: Mapping[str, str], config: Config) -> dict[str, str]:
    """``--bind`` is where every process listens; the router does so at its known port."""
    environment = dict(shared)
    bind, router = config.cluster.bind, config.cluster.router
    if bind and router.startswith("tcp://"):
        host, port = bind.removeprefix("tcp://").partition(":")[0], router.rpartition(":")[2]
        environment["PENSTOCK_BIND"] = f"tcp://{host}:{port}"
    else:
        environment.pop("PENSTOCK_BIND", None)
    return environment
