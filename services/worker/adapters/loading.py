"""Adapters that a worker loads before it is ready."""

from __future__ import annotations

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


def load_adapters(config: Config, model: CausalModel) -> list[Adapter]:
    """Load those that ``--lora`` names into a model that is not prepared yet.

    All are checked before the first is read. Raises ``BadModelFolder``, and ``ConfigError`` where
    the model or its device takes none.
    """
    wanted = named_folders(config)
    if not wanted:
        return []
    if not isinstance(model, Decoder):
        raise ConfigError(f"--lora: {words_of_others(model)}, which takes no adapters")
    if model.device.type != "cpu":
        raise ConfigError("--lora: adapters are computed on CPUs alone; use --device cpu")
    adapters = ModelAdapters(model, config.loading.max_loras)
    checked = []
    for name, folder in wanted:
        try:
            checked.append(AdapterFolder(folder, adapters.sizes, config.loading.max_lora_rank))
        except BadModelFolder as error:
            raise BadModelFolder(f"--lora {show(name)}: {error}") from None
    found = []
    for (name, _), one in zip(wanted, checked, strict=True):
        read = one.read()
        adapters.add(read)
        found.append(Adapter(name, read.digest))
    model.adapters = adapters
    return found
