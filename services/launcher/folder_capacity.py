"""What is known of a model before an engine of it was ever ready."""

from __future__ import annotations

from penstock.protocol.config import Config
from penstock.protocol.model_info import read_model_info
from penstock.protocol.pooling import read_pooling
from penstock.protocol.wire.messages.membership import Capacity


def capacity_of_folder(config: Config) -> Capacity:
    """What its folder says; an engine may turn out to hold shorter sequences. Raises
    ``BadModelFolder``."""
    info = read_model_info(config.model.model)
    pooling = read_pooling(info, config.model)
    return Capacity(
        max_model_len=config.model.max_model_len or info.max_model_len,
        vocab_size=info.vocab_size,
        tasks=pooling.tasks,
        generates=pooling.generates,
        labels=pooling.labels,
        ends=info.eos_token_ids,
    )
