"""What one rank of an engine has of a model: some layers, and of these some heads and columns.

A rank's model is a ``ModelSpecification`` of its own, with its own numbers of heads, columns and
tokens: what allocates, counts and computes reads nothing else. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from msgspec.structs import replace

from penstock.services.worker.models.specification import Layer, ModelSpecification
from penstock.services.worker.models.stage_division import even

MOST_SHARES = 1024
_PEER_BYTES = {2: 1 << 20, 3: 1 << 19, 4: 1 << 19}
_PEER_BYTES_OF_MANY = 1 << 18


def most_peer_bytes(shares: int) -> int:
    """Of the rows that so many GPUs sum over peer memory: larger ones go by NCCL, which sends each
    byte to fewer."""
    return _PEER_BYTES.get(shares, _PEER_BYTES_OF_MANY)


class RankPlace(NamedTuple):
    """Where a rank stands in its engine.

    Rank 0 belongs to the last stage, which draws, so that the rank that answers has the tokens.
    """

    share: int = 0
    """Which of ``shares`` parts of each layer it has (tensor parallelism)."""
    shares: int = 1
    stage: int = 0
    """Which of ``stages`` runs of layers it has (pipeline parallelism)."""
    stages: int = 1
    counts: tuple[int, ...] = ()
    """Layers of each stage, the same on all ranks; empty: evenly divided."""

    @property
    def is_first(self) -> bool:
        """Whether it embeds tokens."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether it makes logits."""
        return self.stage == self.stages - 1

    @property
    def size(self) -> int:
        """Ranks of the engine."""
        return self.shares * self.stages

    @property
    def rank(self) -> int:
        return self.rank_at(self.stage, self.share)

    def rank_at(self, stage: int, share: int) -> int:
        return (self.stages - 1 - stage) * self.shares + share

    def layers(self, count: int) -> range:
        """Its layers of ``count``. Raises ``ValueError`` where the stages have others."""
        counts = self.counts or even(count, self.stages)
        if sum(counts) != count or len(counts) != self.stages:
            raise ValueError(f"{self.stages} stages of {counts} layers, of a model of {count}")
        first = sum(counts[: self.stage])
        return range(first, first + counts[self.stage])


ALONE = RankPlace()


def place_of(rank: int, tensor: int, pipeline: int, counts: tuple[int, ...] = ()) -> RankPlace:
    """tensor, pipeline: ``--tensor-parallel-size`` and ``--pipeline-parallel-size``; counts: layers
    of each stage."""
    behind, share = divmod(rank, tensor)
    return RankPlace(share, tensor, pipeline - 1 - behind, pipeline, counts)


def own_model(model: ModelSpecification, place: RankPlace) -> ModelSpecification:
    """The model of this rank alone; ``why_not`` must have found nothing."""
    if place.size == 1:
        return model
    chosen = place.layers(len(model.layers))
    layers = tuple(
        _own_layer(layer, place.shares) for layer in model.layers[chosen.start : chosen.stop]
    )
    return replace(
        model,
        vocab_size=-(-model.vocab_size // place.shares),
        layers=layers,
        first_layer=chosen.start,
        embeds=place.is_first,
        predicts=place.is_last,
        embedding_multiplier=model.embedding_multiplier if place.is_first else 1.0,
    )


def with_own_heads(model: ModelSpecification, place: RankPlace) -> tuple[Layer, ...]:
    """All layers of the model, as wide as this rank has its own."""
    return tuple(_own_layer(layer, place.shares) for layer in model.layers)


def _own_layer(layer: Layer, shares: int) -> Layer:
    attention, mlp = layer.attention, layer.mlp
    return replace(
        layer,
        attention=replace(
            attention,
            num_heads=attention.num_heads // shares,
            num_kv_heads=max(1, attention.num_kv_heads // shares),
        ),
        mlp=replace(mlp, width=mlp.width // shares),
    )


def part_of(whole: int, own: int, place: RankPlace) -> int:
    """Where a rank's share of ``own`` numbers begins among ``whole``. Where there are fewer shares
    than ranks, as of KV heads, neighbouring ranks have the same one."""
    return (place.share * (whole // own) // place.shares) * own


def own_tokens(vocab_size: int, place: RankPlace) -> range:
    """The tokens whose logits a rank makes: equally many on all ranks, but for the last ones."""
    width = -(-vocab_size // place.shares)
    first = min(place.share * width, vocab_size)
    return range(first, min(first + width, vocab_size))


def why_not(model: ModelSpecification, tensor: int, pipeline: int) -> str:
    """Why a model cannot be divided so, with the sizes that work; empty if it can."""
    if pipeline > len(model.layers):
        return (
            f"--pipeline-parallel-size {pipeline}: the model has {len(model.layers)} layers; at "
            f"most {len(model.layers)} stages work"
        )
    if tensor == 1:
        return ""
    if not own_tokens(model.vocab_size, RankPlace(tensor - 1, tensor)):
        return (
            f"--tensor-parallel-size {tensor}: of a vocabulary of {model.vocab_size} tokens the "
            "last rank has none; fewer ranks work"
        )
    layers = dict.fromkeys(model.layers)
    if any(each.attention.qk_norm_over == "all" for each in layers if each.attention.qk_norm):
        return (
            f"--tensor-parallel-size {tensor}: the model's norms of queries and keys go over all "
            "heads together, which no rank has; --pipeline-parallel-size divides it by layers"
        )
    wrong = [found for layer in layers if (found := _undivided(layer, tensor))]
    if not wrong:
        return ""
    sizes = ", ".join(map(str, divisors(layers)))
    return f"--tensor-parallel-size {tensor}: {wrong[0]}; sizes that work: {sizes}"


def divisors(layers: Iterable[Layer]) -> list[int]:
    """The numbers of ranks that all of these layers can be divided among."""
    layers = list(layers)
    most = min(layer.attention.num_heads for layer in layers)
    return [
        shares
        for shares in range(1, min(most, MOST_SHARES) + 1)
        if not any(_undivided(layer, shares) for layer in layers)
    ]


def _undivided(layer: Layer, shares: int) -> str:
    """What of a layer cannot be divided, in words; empty: nothing."""
    heads, kv_heads = layer.attention.num_heads, layer.attention.num_kv_heads
    if heads % shares:
        return f"{heads} attention heads are no multiple of it"
    if kv_heads % shares and shares % kv_heads:
        return f"{kv_heads} KV heads are no multiple of it, nor it of them"
    if layer.mlp.width % shares:
        return f"an MLP of {layer.mlp.width} columns is no multiple of it"
    return ""
