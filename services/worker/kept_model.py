"""Whether a model's KV blocks can be kept outside of its memory, and its weights beyond its worker,
as far as its folder tells."""

from __future__ import annotations

import contextlib

from penstock.protocol.config import Config, ConfigError
from penstock.protocol.model_info import BadModelFolder, ModelInfo
from penstock.protocol.pooling import read_pooling
from penstock.services.worker.kv_copies import NOT_KEPT
from penstock.services.worker.layer_groups import group_layers
from penstock.services.worker.model_choice import choose_model
from penstock.services.worker.model_shape import read_shape

NOT_HELD = (
    "--hold-weights keeps those of models that generate, of Penstock's own families; {}: start it "
    "without"
)


def check_held(config: Config, info: ModelInfo) -> None:
    """Raises ``ConfigError`` ahead of loading a model whose weights are to be held and cannot
    be."""
    if not config.loading.hold_weights:
        return
    pooling = read_pooling(info, config.model)
    if pooling.encoder or pooling.tasks or not pooling.generates:
        raise ConfigError(NOT_HELD.format("this one does other tasks"))
    with contextlib.suppress(BadModelFolder):  # loading says it better
        if choose_model(info, config).specification is None:
            raise ConfigError(NOT_HELD.format("this one is computed by transformers' code"))


def check_kept(config: Config, info: ModelInfo) -> None:
    """Raises ``ConfigError`` ahead of loading a model whose blocks are to be kept and cannot be.
    What the folder does not tell, ``copies_of`` finds when the model is loaded."""
    if not config.cache.has_tiers:
        return
    if read_pooling(info, config.model).encoder:
        raise ConfigError(NOT_KEPT)
    try:
        shape = read_shape(info, config)
    except (BadModelFolder, ConfigError):
        return  # loading says it better
    if not shape.estimated and group_layers(shape.caches).groups:
        raise ConfigError(NOT_KEPT)
