"""A decoder's layers as an encoder: each position attends to all others, as in EmbeddingGemma."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

from penstock.protocol.model_info import BadModelFolder, ModelInfo
from penstock.protocol.pooling import BIDIRECTIONAL
from penstock.services.worker.encoders.attention import RowAttention, attention_of
from penstock.services.worker.encoders.packed_rows import PackedRows
from penstock.services.worker.encoders.specification import LayerKind
from penstock.services.worker.load_report import LoadReport
from penstock.services.worker.model_weights import load_model, random_model
from penstock.services.worker.models.causal_model import StepInputs
from penstock.services.worker.models.decoder import Decoder
from penstock.services.worker.models.specification import CacheSpecification


class _WholeAttention(NamedTuple):
    """A ``StepAttention`` of whole prompts, which writes to no cache."""

    attention: RowAttention
    caches: Sequence[CacheSpecification]

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        if sinks is not None:
            raise ValueError("attention to whole prompts has no sinks")
        cache = self.caches[layer]
        kind = LayerKind(window=cache.window // 2)  # half of it on either side
        return self.attention(query, key, value, kind, cache.score_scale).flatten(1)


class BidirectionalDecoder:
    """What ``Encoder`` is, of a decoder's layers."""

    def __init__(self, decoder: Decoder, longest: int) -> None:
        """longest: tokens of a prompt, at most."""
        head = decoder.weights.lm_head
        head.weight = head.weight[:1].clone()  # nobody asks for logits
        decoder.prepare(longest)
        self._decoder = decoder

    @property
    def device(self) -> torch.device:
        return self._decoder.device

    @property
    def hidden_size(self) -> int:
        return self._decoder.hidden_size

    def __call__(self, rows: PackedRows) -> Tensor:
        """[N, hidden]."""
        decoder = self._decoder
        attention = _WholeAttention(attention_of(rows), decoder.caches)
        hidden = decoder.hidden(StepInputs(rows.tokens, rows.positions, attention, None), None)
        return decoder.last_hidden(hidden, None)


def load_bidirectional(
    info: ModelInfo,
    longest: int,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[str], None],
    loaded: Callable[[LoadReport], None],
    random_seed: int | None = None,
) -> BidirectionalDecoder:
    """random_seed: of weights that are drawn instead of read. Raises ``BadModelFolder``."""
    plain = replace(info, config={**info.config, BIDIRECTIONAL: False})
    if random_seed is None:
        decoder = load_model(plain, dtype, device, progress, loaded, longest, headless=True)
    else:
        decoder = random_model(plain, dtype, device, random_seed, longest)
    if any(cache.softcap or cache.sinks for cache in decoder.caches):
        raise BadModelFolder(
            f"{info.folder / 'config.json'}: {BIDIRECTIONAL} with capped scores or sinks is not "
            "supported"
        )
    return BidirectionalDecoder(decoder, longest)
