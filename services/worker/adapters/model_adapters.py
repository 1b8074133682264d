"""The adapters of one decoder: which of its linear layers they change, and what each rank has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from penstock.kernels.low_rank import LowRank, LowRankPart
from penstock.services.worker.adapters.adapted_linear import AdaptedLinear, StepRows
from penstock.services.worker.adapters.peft_folder import LayerSize, LowRankPair, ReadAdapter
from penstock.services.worker.models.linear import Linear
from penstock.services.worker.models.linear_shares import share_of
from penstock.services.worker.models.linear_specification import LayerLinears, model_linears
from penstock.services.worker.models.rank_decoder import RankDecoder
from penstock.services.worker.models.rank_shares import ALONE

if TYPE_CHECKING:
    from penstock.services.worker.models.decoder import Decoder

_PREFIX = "model."


class _Target(NamedTuple):
    """What this rank has of the outputs that a checkpoint stores under one name."""

    linear: Linear
    product: AdaptedLinear
    outputs: list[range]
    """In the numbers of the whole layer …"""
    first: int
    """… and where they begin among this rank's."""
    inputs: range


class ModelAdapters:
    """Adapters by number, and the products that apply them. To be made before the decoder is
    prepared; adapters may come and go between steps."""

    def __init__(self, decoder: Decoder, most: int) -> None:
        """most: adapters at once."""
        self._dtype, self._device, self._most = decoder.dtype, decoder.device, most
        self.numbers: dict[str, int] = {}
        """Digest → number, from 1 on."""
        self.step = StepRows()
        self.layers = [
            LayerLinears(*(AdaptedLinear(linear, self.step, most) for linear in layer.linears))
            for layer in decoder.weights.layers
        ]
        self.sizes: Mapping[str, LayerSize]
        """Of the linear layers of the whole model, by their names in PEFT folders."""
        self._targets: dict[str, _Target] = {}
        self._find_targets(decoder)

    def _find_targets(self, decoder: Decoder) -> None:
        place, whole = ALONE, decoder.specification
        if isinstance(decoder, RankDecoder):
            place, whole = decoder.ranks.place, decoder.whole
        weights, sizes = decoder.weights, {}
        for index, specifications in enumerate(model_linears(whole, weights.names).layers):
            prefix = weights.names.layer.format(index)
            prefix = prefix if prefix.startswith(_PREFIX) else _PREFIX + prefix
            at = index - weights.first_layer
            is_own = 0 <= at < len(weights.layers)
            for which, specification in enumerate(specifications):
                for name, outputs in specification.stored.items():
                    sizes[prefix + name] = LayerSize(outputs, specification.inputs)
                if not is_own:
                    continue
                linear = weights.layers[at].linears[which]
                share = share_of(specification, linear.specification, place)
                first = 0
                for name, rows in share.outputs.items():
                    self._targets[prefix + name] = _Target(
                        linear, self.layers[at][which], rows, first, share.inputs
                    )
                    first += sum(map(len, rows))
        self.sizes = sizes

    def add(self, adapter: ReadAdapter) -> int:
        """``prepared`` and ``place`` at once."""
        return self.place(adapter.digest, self.prepared(adapter))

    def place(self, digest: str, updates: dict[AdaptedLinear, LowRank]) -> int:
        """The number under which an adapter is applied from now on. Raises ``RuntimeError`` where
        there is no room for one more."""
        known = self.numbers.get(digest)
        if known is not None:
            return known
        taken = set(self.numbers.values())
        number = next((one for one in range(1, self._most + 1) if one not in taken), 0)
        if not number:
            raise RuntimeError(
                f"{self._most} adapters are loaded, as --max-loras allows; unload one first"
            )
        for product, update in updates.items():
            product.updates[number] = update
        self.numbers[digest] = number
        return number

    def prepared(self, adapter: ReadAdapter) -> dict[AdaptedLinear, LowRank]:
        """What this rank adds to each of its layers, on the device."""
        found: dict[AdaptedLinear, list[tuple[_Target, LowRankPair]]] = {}
        for module, pair in adapter.pairs.items():
            if (target := self._targets.get(module)) is not None:
                found.setdefault(target.product, []).append((target, pair))
        return {product: self._joined(parts) for product, parts in found.items()}

    def _joined(self, parts: list[tuple[_Target, LowRankPair]]) -> LowRank:
        downs, ups, rank = [], [], 0
        for target, pair in parts:
            columns = target.inputs
            downs.append(pair.down[:, columns.start : columns.stop].to(self._dtype))
            ups.append(LowRankPart(self._up(target, pair), target.first, rank))
            rank += len(pair.down)
        return LowRank(torch.cat(downs).to(self._device).contiguous(), tuple(ups))

    def _up(self, target: _Target, pair: LowRankPair) -> Tensor:
        """B of this rank's outputs, in their order."""
        up = torch.cat([pair.up[rows.start : rows.stop] for rows in target.outputs])
        if (order := target.linear.order) is not None:
            own = order[target.first : target.first + len(up)] - target.first
            up[: len(own)] = up[own]
        scaled = up.float() * pair.scale
        return scaled.to(device=self._device, dtype=self._dtype).contiguous()

    def remove(self, digest: str) -> None:
        """Forget an adapter of which no row is computed any more."""
        number = self.numbers.pop(digest)
        for layer in self.layers:
            for product in layer:
                product.updates[number] = None
