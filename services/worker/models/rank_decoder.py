"""A rank's part of a decoder: its layers, and of these its share."""

from __future__ import annotations

from msgspec.structs import replace
from torch import Tensor
from torch.nn.functional import embedding

from penstock.services.worker.layer_groups import LayerGroups, group_layers, of_layers
from penstock.services.worker.models.causal_model import StepInputs
from penstock.services.worker.models.decoder import Decoder
from penstock.services.worker.models.dense import DenseConfig
from penstock.services.worker.models.rank_shares import own_tokens, with_own_heads
from penstock.services.worker.models.specification import ModelSpecification, cache_of
from penstock.services.worker.models.weights import DecoderWeights
from penstock.services.worker.rank_group import RankGroup


class VocabularyShare:
    """The embedding of tokens whose rows are divided among the ranks of a stage."""

    def __init__(self, table: Tensor, ranks: RankGroup) -> None:
        """table: [n, hidden], the rows of this rank."""
        self._table, self._ranks = table, ranks
        self._first = ranks.place.share * len(table)

    def __call__(self, tokens: Tensor) -> Tensor:
        own = tokens - self._first
        others = (own < 0) | (own >= len(self._table))
        rows = embedding(own.masked_fill_(others, 0), self._table)
        return self._ranks.sum(rows.masked_fill_(others.unsqueeze(1), 0.0))


class RankDecoder(Decoder):
    """A ``CausalModel`` of which the other ranks have the rest.

    All ranks of a stage have the whole residual stream. ``hidden`` of a stage that is not the last
    hands all rows on; ``logits`` of the last one are those of this rank's tokens.
    """

    def __init__(
        self,
        whole: ModelSpecification,
        specification: ModelSpecification,
        weights: DecoderWeights,
        ranks: RankGroup,
    ) -> None:
        """whole: the model of all ranks; specification: of this one's weights."""
        super().__init__(specification, weights)
        self.ranks, self.whole = ranks, whole
        self.vocab_size = whole.vocab_size
        place = ranks.place
        self.grouped: LayerGroups = of_layers(
            group_layers([cache_of(layer) for layer in with_own_heads(whole, place)]),
            place.layers(len(whole.layers)),
        )
        """As the whole model's, so that blocks mean the same to all ranks."""
        self._embedding = VocabularyShare(weights.embedding, ranks)
        if not specification.embeds:
            self._embedding = self._handed_on

    def own_vocabulary(self, form: DenseConfig) -> DenseConfig:
        """The form of this rank's model for the kernels: logits are of its own tokens."""
        return replace(form, vocab_size=len(own_tokens(self.vocab_size, self.ranks.place)))

    def _handed_on(self, tokens: Tensor) -> Tensor:
        rows = self.weights.embedding.new_empty(len(tokens), self.hidden_size)
        return self.ranks.take(rows)

    def hidden(self, step: StepInputs, rows: Tensor | None) -> Tensor:
        if self.specification.predicts:
            return super().hidden(step, rows)
        residual = super().hidden(step, None)
        self.ranks.hand_on(residual)
        return residual if rows is None else residual.index_select(0, rows)

    def logits(self, hidden: Tensor, rows: Tensor | None) -> Tensor:
        """[len(rows), own tokens]: see ``CausalModel``."""
        count = len(own_tokens(self.vocab_size, self.ranks.place))
        if self.specification.predicts:
            return super().logits(hidden, rows)[:, :count]
        return hidden.new_zeros(len(hidden) if rows is None else len(rows), count)
