"""Layers of the stages of a pipeline on devices whose memory is known."""

from __future__ import annotations

from msgspec.structs import replace

from penstock.protocol.config import Config
from penstock.protocol.config.model_dtype import ITEM_BYTES
from penstock.protocol.model_info import ModelInfo
from penstock.services.worker.layouts.division import Layout
from penstock.services.worker.memory_account import MemoryAccount
from penstock.services.worker.model_choice import choose_model
from penstock.services.worker.models.specification import CacheSpecification, cache_of
from penstock.services.worker.models.stage_division import StageRoom, divided
from penstock.services.worker.plan import Planner
from penstock.services.worker.rank_choice import StageLayers, costs_of, words_of_bytes


def limited_layers(
    planner: Planner, info: ModelInfo, config: Config, layout: Layout, tokens: int
) -> StageLayers | None:
    """The balanced division of those of which each stage has room; ``None`` where none has. The
    arguments: see ``stage_room``. Raises ``ConfigError`` and ``BadModelFolder``."""
    model = choose_model(info, config).specification
    room = stage_room(planner, info, config, layout, tokens)
    if model is None or room is None:
        return None
    costs = costs_of(config, info, model)
    try:
        counts = divided(costs.layers, layout.pipeline, costs.last, room)
    except ValueError:
        return None
    reason = words_of_bytes(costs, counts)
    if counts != divided(costs.layers, layout.pipeline, costs.last):
        reason += f"; the most balanced that leave room for the KV of {tokens:,} tokens"
    return StageLayers(counts, reason)


def stage_room(
    planner: Planner, info: ModelInfo, config: Config, layout: Layout, tokens: int
) -> StageRoom | None:
    """What a device of each stage has for weights and for the keys and values of ``tokens``;
    ``None`` for a model that cannot be divided. config: complete; its ``pipeline_layers`` is passed
    over. Raises ``ConfigError`` and ``BadModelFolder``."""
    model = choose_model(info, config).specification
    if model is None:
        return None
    free = replace(config, cluster=replace(config.cluster, pipeline_layers="even"))
    even = [planner.beside_kv(layout.config(free, place)) for place in layout.places()]
    costs = costs_of(config, info, model)
    item = ITEM_BYTES[planner.type_name(config)]
    weights = sum(one.bytes_of("weights") for one in even)
    # Costs count plain numbers as 16 bits, and the whole of each layer; an account what a rank has.
    scale = weights / (sum(costs.layers) + costs.embedding + costs.head)
    shares = layout.tensor
    caches = [_kv_bytes(cache_of(layer), shares, tokens, item) for layer in model.layers]
    return StageRoom(
        [round(scale * one) + kv for one, kv in zip(costs.layers, caches, strict=True)],
        round(scale * costs.embedding),
        round(scale * costs.head),
        min(map(_for_layers, even)),
    )


def _for_layers(account: MemoryAccount) -> int:
    """Bytes that a stage has for weights and KV memory."""
    return account.usable - account.beside + account.bytes_of("weights")


def _kv_bytes(cache: CacheSpecification, shares: int, tokens: int, item: int) -> int:
    """Of a layer's part on one of ``shares`` ranks; a quantized cache takes less."""
    kept = min(cache.window or tokens, tokens)
    return 2 * max(1, cache.num_kv_heads // shares) * cache.head_dim * kept * item
