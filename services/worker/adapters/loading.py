"""Adapters that a worker loads before it is ready."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from penstock.protocol.config import Config, ConfigError
from penstock.protocol.config.adapters import named_folders
from penstock.protocol.model_info import BadModelFolder
from penstock.protocol.shown_values import show
from penstock.protocol.wire.messages.engine import Adapter
from penstock.services.worker.adapters.model_adapters import ModelAdapters
from penstock.services.worker.adapters.peft_folder import AdapterFolder
from penstock.services.worker.loaded_model import words_of_others
from penstock.services.worker.models.causal_model import CausalModel
from penstock.services.worker.models.decoder import Decoder

_log = logging.getLogger("penstock.worker")


def load_adapters(config: Config, model: CausalModel) -> list[Adapter]:
    """Load those that ``--lora`` names into a model that is not prepared yet.

    All are checked before the first is read. Raises ``BadModelFolder``, and ``ConfigError`` where
    the model or its device takes none.
    """
    wanted, flag = named_folders(config), "--lora" if config.loading.lora else "--lora-dirs"
    if not wanted and not config.launch.lora_dirs:
        return []
    if not isinstance(model, Decoder):
        raise ConfigError(f"{flag}: {words_of_others(model)}, which takes no adapters")
    if model.device.type != "cpu":
        raise ConfigError(f"{flag}: adapters are computed on CPUs alone; use --device cpu")
    adapters = ModelAdapters(model, config.loading.max_loras)
    model.adapters = adapters
    checked = {}
    for name, folder in wanted:
        with _told(name, required=config.loading.lora_required):
            checked[name] = AdapterFolder(folder, adapters.sizes, config.loading.max_lora_rank)
    found = []
    for name, one in checked.items():
        with _told(name, required=config.loading.lora_required):
            read = one.read()
            adapters.add(read)
            found.append(Adapter(name, read.digest))
    return found


@contextlib.contextmanager
def _told(name: str, *, required: bool) -> Iterator[None]:
    """Say of a failure which adapter it is of; if that is not required, in the log alone."""
    try:
        yield
    except (BadModelFolder, RuntimeError) as error:
        message = f"--lora {show(name)}: {error}"
        if required:
            raise BadModelFolder(message) from None
        _log.error("an adapter is not loaded: %s", message)
