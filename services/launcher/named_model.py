"""The folder of a model that was not named by one: the built-in model, or one of the hub."""

from __future__ import annotations

import msgspec

from penstock.protocol.config import Config, Provenance
from penstock.protocol.config.sources import Source
from penstock.protocol.model_hub import find_model, is_hub_name
from penstock.protocol.model_info import BadModelFolder
from penstock.services.launcher.builtin_model import NAME, builtin_model


def with_builtin_model(config: Config, sources: Provenance) -> tuple[Config, Provenance]:
    """The built-in model, under its own name unless another was given."""
    reason = "the built-in model: none was named"
    origin = Source("derived", reason)
    return _with_folder(config, sources, str(builtin_model()), NAME, origin, origin)


def with_hub_model(
    config: Config, sources: Provenance, *, only_look: bool = False
) -> tuple[Config, Provenance]:
    """A name of the hub replaced by its folder, and served under that name unless another was
    given. ``only_look``: in the local cache; a name that is not there stays.

    Raises ``BadModelFolder``.
    """
    name = config.model.model
    if not is_hub_name(name):
        return config, sources
    try:
        folder = find_model(name, config, only_look=only_look)
    except BadModelFolder:
        if only_look:
            return config, sources
        raise
    given = sources["model"]
    origin = Source(given.origin, f"{given.detail} {name}, in the hub's cache".lstrip())
    named = Source("derived", "the model's name on the hub")
    return _with_folder(config, sources, str(folder), name, origin, named)


def _with_folder(
    config: Config, sources: Provenance, folder: str, name: str, origin: Source, named: Source
) -> tuple[Config, Provenance]:
    changed: dict[str, object] = {"model": folder}
    sources = sources | {"model": origin}
    if not config.model.served_model_name:
        changed["served_model_name"] = [name]
        sources["served_model_name"] = named
    model = msgspec.structs.replace(config.model, **changed)
    return msgspec.structs.replace(config, model=model), sources
