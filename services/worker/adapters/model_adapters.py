"""The adapters of one decoder: which of its linear layers they change, and what each rank has."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from penstock.kernels.low_rank import LowRank, LowRankPart
from penstock.protocol.config.adapters import AdapterLimits
from penstock.protocol.model_info import BadModelFolder
from penstock.services.worker.adapters.adapted_linear import AdaptedLinear, StepRows
from penstock.services.worker.adapters.checked_folder import NOT_ON_GPUS, AdaptableModel
from penstock.services.worker.adapters.peft_folder import (
    LayerSize,
    LowRankPair,
    ReadAdapter,
    largest,
)
from penstock.services.worker.adapters.soft_prompt import MAX_VIRTUAL_TOKENS, VirtualTokens
from penstock.services.worker.models.adapter import TensorNames
from penstock.services.worker.models.causal_model import VirtualRows
from penstock.services.worker.models.linear import Linear
from penstock.services.worker.models.linear_shares import share_of
from penstock.services.worker.models.linear_specification import LayerLinears, model_linears
from penstock.services.worker.models.rank_decoder import RankDecoder
from penstock.services.worker.models.rank_shares import ALONE
from penstock.services.worker.models.specification import ModelSpecification

if TYPE_CHECKING:
    from penstock.services.worker.models.decoder import Decoder

_PREFIX = "model."


def layer_sizes(model: ModelSpecification, names: TensorNames) -> dict[str, LayerSize]:
    """Of the linear layers of a whole model, by their names in PEFT folders."""
    return {
        _prefix(names, index) + name: LayerSize(outputs, specification.inputs)
        for index, layer in enumerate(model_linears(model, names).layers)
        for specification in layer
        for name, outputs in specification.stored.items()
    }


def adaptable(
    model: ModelSpecification, names: TensorNames, most_virtual_tokens: int, device: str
) -> AdaptableModel:
    """device: ``cpu`` or ``cuda``."""
    refusal = "" if device == "cpu" else NOT_ON_GPUS
    return AdaptableModel(
        layer_sizes(model, names), model.hidden_size, most_virtual_tokens, refusal
    )


def _prefix(names: TensorNames, layer: int) -> str:
    prefix = names.layer.format(layer)
    return prefix if prefix.startswith(_PREFIX) else _PREFIX + prefix


class _Target(NamedTuple):
    """What this rank has of the outputs that a checkpoint stores under one name."""

    linear: Linear
    product: AdaptedLinear
    outputs: list[range]
    """In the numbers of the whole layer …"""
    first: int
    """… and where they begin among this rank's."""
    inputs: range
    factor: float
    """What the layer's results are multiplied by where the weights hold that."""


class Updates(NamedTuple):
    """What one adapter has on this rank."""

    linears: Mapping[AdaptedLinear, LowRank]
    """What it adds to each linear layer."""
    virtual: VirtualTokens | None = None
    """What stands ahead of the prompts, where the rank has the embedding."""

    @property
    def num_bytes(self) -> int:
        parts = sum(one.num_bytes for one in self.linears.values())
        return parts + (0 if self.virtual is None else self.virtual.num_bytes)


@dataclass(slots=True, eq=False)
class Coming:
    """An adapter on its way into a place."""

    digest: str
    number: int
    """Of the place, from 1 on."""
    updates: Updates


class ModelAdapters:
    """The adapters that are loaded, and the products that apply those of them that are in a place.
    To be made before the decoder is prepared; adapters may come and go between steps. All but
    ``prepared`` and ``fill`` is for the thread that computes the steps."""

    def __init__(
        self,
        decoder: Decoder,
        limits: AdapterLimits,
        max_rank: int = 0,
        most_virtual_tokens: int = MAX_VIRTUAL_TOKENS,
    ) -> None:
        """limits: beside each that replaces another there may be one more; max_rank:
        ``--max-lora-rank``; most_virtual_tokens: of a soft prompt."""
        self._dtype, self._on, self._limits = decoder.dtype, decoder.device, limits
        self._max_rank = max_rank
        self.places = places = limits.places
        self.folders: dict[str, Path] = {}
        """By digest: where each that is loaded was read."""
        self.held: dict[str, Updates] = {}
        """By digest: those in the host's memory, the least recently wanted one first."""
        self.numbers: dict[str, int] = {}
        """Digest → number of its place, from 1 on, of those that are in one."""
        self._coming: dict[str, Coming] = {}
        self.step = StepRows()
        self.layers = [
            LayerLinears(*(AdaptedLinear(linear, self.step, places) for linear in layer.linears))
            for layer in decoder.weights.layers
        ]
        self.virtual: list[VirtualTokens | None] = [None] * (1 + places)
        """By the number of an adapter."""
        whole = decoder.whole if isinstance(decoder, RankDecoder) else decoder.specification
        self.model = adaptable(whole, decoder.weights.names, most_virtual_tokens, self._on.type)
        """The whole model, whatever this rank has of it."""
        self._embeds = decoder.specification.embeds
        multiplier = whole.embedding_multiplier if whole.multiplies_inputs else 1.0
        self._virtual_multiplier = torch.tensor(multiplier, dtype=self._dtype).item()
        self._targets: dict[str, _Target] = {}
        self._find_targets(decoder, whole)

    def _find_targets(self, decoder: Decoder, whole: ModelSpecification) -> None:
        place = decoder.ranks.place if isinstance(decoder, RankDecoder) else ALONE
        weights = decoder.weights
        layers = model_linears(whole, weights.names).layers
        for at in range(len(weights.layers)):
            prefix = _prefix(weights.names, weights.first_layer + at)
            for which, specification in enumerate(layers[weights.first_layer + at]):
                linear = weights.layers[at].linears[which]
                share = share_of(specification, linear.specification, place)
                first = 0
                for name, rows in share.outputs.items():
                    self._targets[prefix + name] = _Target(
                        linear, self.layers[at][which], rows, first, share.inputs,
                        self.factor(at, which),
                    )  # fmt: skip
                    first += sum(map(len, rows))

    def factor(self, layer: int, which: int) -> float:
        """What the weights of one of this rank's linear layers are multiplied by, beside what a
        checkpoint holds; which: of ``LayerLinears``."""
        return 1.0

    @property
    def item_bytes(self) -> int:
        """Of a number of an adapter that is loaded."""
        return self._dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """What they take of the memory in which steps are computed, on this rank: on a CPU all that
        are held, on a device as many as there are places, of the highest rank."""
        if self._on.type == "cpu":
            return self.num_taken
        linears = [product.specification for layer in self.layers for product in layer]
        width = sum(len(one.stored) * one.inputs + one.outputs for one in linears)
        return self.places * self._max_rank * width * self.item_bytes

    @property
    def num_taken(self) -> int:
        """Bytes that they have of it by now."""
        if self._on.type == "cpu":
            return sum(updates.num_bytes for updates in self.held.values())
        each = (product.updates for layer in self.layers for product in layer)
        return sum(one.num_bytes for updates in each for one in updates if one is not None)

    def add(self, digest: str, updates: Updates, folder: Path) -> None:
        """Load an adapter of which this was ``prepared``, and bring it into a place where one is
        free."""
        self.load(digest, folder)
        self.hold(digest, updates)
        is_there = digest in self.numbers
        if not is_there and (coming := self.reserve(digest)) is not None:
            self.fill(coming)
            self.settle(coming)

    def load(self, digest: str, folder: Path, *, replaces: bool = False) -> None:
        """Let there be one more adapter. replaces: another one leaves for it, and is there until
        its last request has ended. Raises ``RuntimeError`` where there are as many as may be."""
        most = self._limits.loaded
        if digest not in self.folders and len(self.folders) >= most + replaces:
            raise RuntimeError(
                f"{len(self.folders)} adapters are loaded, and --max-registered-loras (unless it "
                f"is given, --max-cpu-loras or --max-loras) allows {most}; unload one, or wait "
                "until what was unloaded or replaced has no request any more"
            )
        self.folders[digest] = folder

    def hold(self, digest: str, updates: Updates) -> None:
        """Keep what was ``prepared`` of an adapter that is loaded. Where memory has as many as it
        may, the least recently wanted one that is in no place leaves it."""
        self.held[digest] = self.held.pop(digest, updates)
        most = self._limits.held + max(0, len(self.folders) - self._limits.loaded)
        free = [one for one in self.held if one not in self.numbers and one not in self._coming]
        for one in free[: max(0, len(self.held) - most)]:
            del self.held[one]

    def keep_only(self, digests: Container[str]) -> None:
        """Let all others leave their places: no later step has a row of them."""
        for digest in [one for one in self._coming if one not in digests]:
            del self._coming[digest]
        for digest in [one for one in self.numbers if one not in digests]:
            self.leave(digest)

    def coming(self, digest: str) -> Coming | None:
        """What is on its way."""
        return self._coming.get(digest)

    def reserve(self, digest: str) -> Coming | None:
        """A place for an adapter that is held and in none, for ``fill`` and then ``settle``.
        ``None``: all are taken."""
        taken = {*self.numbers.values(), *(one.number for one in self._coming.values())}
        free = next((one for one in range(1, self.places + 1) if one not in taken), 0)
        if not free:
            return None
        updates = self.held[digest] = self.held.pop(digest)
        coming = self._coming[digest] = Coming(digest, free, updates)
        return coming

    def fill(self, coming: Coming) -> None:
        """Copy an adapter into its place, in any thread: one at a time, in the order in which the
        places were reserved. Here the products read the tensors where they are, once these are on
        the model's device."""
        if self._on.type != "cpu":
            updates = coming.updates
            linears = {product: one.to(self._on) for product, one in updates.linears.items()}
            coming.updates = updates._replace(linears=linears)

    def settle(self, coming: Coming) -> None:
        """Steps may have an adapter from now on whose place is filled."""
        self.abandon(coming)
        self.apply(coming)
        self.numbers[coming.digest] = coming.number

    def abandon(self, coming: Coming) -> None:
        """It is on its way no more."""
        del self._coming[coming.digest]

    def apply(self, coming: Coming) -> None:
        """Let the products apply an adapter from now on."""
        for product, update in coming.updates.linears.items():
            product.updates[coming.number] = update
        self.virtual[coming.number] = coming.updates.virtual

    def prepared(self, adapter: ReadAdapter) -> Updates:
        """What this rank has of an adapter, in the host's memory. Raises ``BadModelFolder`` on
        every rank for what the model's type cannot hold, whoever has that layer."""
        found: dict[AdaptedLinear, list[tuple[_Target, LowRankPair]]] = {}
        for module, pair in adapter.pairs.items():
            self._check_range(module, pair)
            if (target := self._targets.get(module)) is not None:
                found.setdefault(target.product, []).append((target, pair))
        linears = {product: self._joined(parts) for product, parts in found.items()}
        rows = adapter.virtual
        return Updates(linears, None if rows is None else self._virtual_tokens(rows))

    def _virtual_tokens(self, stored: Tensor) -> VirtualTokens | None:
        """stored: [n, hidden]; ``None`` where another rank has the embedding."""
        scale = self._virtual_multiplier
        self._check_number("prompt_embeddings", largest(stored) * scale, scale)
        if not self._embeds:
            return None
        return VirtualTokens((stored.to(self._dtype) * scale).contiguous())

    def _check_range(self, module: str, pair: LowRankPair) -> None:
        most = (largest(pair.down), largest(pair.up) * abs(pair.scale))
        for which, one in zip("AB", most, strict=True):
            self._check_number(f"{module}.lora_{which}", one, pair.scale)

    def _check_number(self, what: str, most: float, scale: float) -> None:
        """Conversion is monotonic, so the largest number of a matrix, scaled, tells for all."""
        if not bool(torch.isfinite(torch.tensor(most).to(self._dtype))):
            raise BadModelFolder(
                f"{what}: scaled by {scale:g}, its largest number is out of the range of "
                f"{self._dtype}"
            )

    def _joined(self, parts: list[tuple[_Target, LowRankPair]]) -> LowRank:
        downs, ups, rank = [], [], 0
        for target, pair in parts:
            columns = target.inputs
            downs.append(pair.down[:, columns.start : columns.stop].to(self._dtype))
            ups.append(LowRankPart(self._up(target, pair), target.first, rank))
            rank += len(pair.down)
        return LowRank(torch.cat(downs).contiguous(), tuple(ups))

    def _up(self, target: _Target, pair: LowRankPair) -> Tensor:
        """B of this rank's outputs, in their order."""
        up = torch.cat([pair.up[rows.start : rows.stop] for rows in target.outputs])
        if (order := target.linear.order) is not None:
            own = order[target.first : target.first + len(up)] - target.first
            up[: len(own)] = up[own]
        scaled = up.float() * (pair.scale * target.factor)
        return scaled.to(self._dtype).contiguous()

    def put_virtual(self, residual: Tensor, places: Sequence[VirtualRows]) -> None:
        """Put rows of soft prompts where a step has virtual tokens. residual: [N, hidden], the
        embeddings of its rows."""
        for adapter, first, length, start in places:
            virtual = self.virtual[adapter]
            if virtual is not None:
                residual[first : first + length] = virtual.rows[start : start + length]

    def leave(self, digest: str) -> None:
        """Free the place of an adapter of which no row is computed any more."""
        number = self.numbers.pop(digest)
        for layer in self.layers:
            for product in layer:
                product.updates[number] = None
        self.virtual[number] = None

    def remove(self, digest: str) -> None:
        """Forget an adapter of which no row is computed any more."""
        self._coming.pop(digest, None)
        if digest in self.numbers:
            self.leave(digest)
        self.held.pop(digest, None)
        self.folders.pop(digest, None)
