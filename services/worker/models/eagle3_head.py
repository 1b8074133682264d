"""An EAGLE-3 head computed with torch's operations: see ``eagle3``.

The row of position p is made of token p and of the target's features of position p - 1, so what it
keeps depends on tokens up to p alone, as with any layer. Position 0 has no features before it: its
row is never attended to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import embedding

from penstock.kernels.rotary import cos_sin_table
from penstock.protocol.model_info import BadModelFolder
from penstock.services.worker.checkpoint import Checkpoint
from penstock.services.worker.models.causal_model import StepInputs
from penstock.services.worker.models.decoder import DecoderLayer, Tables, norm_of, rows_at
from penstock.services.worker.models.eagle3 import Eagle3Specification
from penstock.services.worker.models.linear import Linear
from penstock.services.worker.models.linear_specification import LayerLinears
from penstock.services.worker.models.specification import CacheSpecification
from penstock.services.worker.models.weights import LayerWeights, NormWeights

LOWEST = -1e30
"""The logit of a token that the head does not draft."""


class Eagle3Head:
    """One decoder layer over the embedding of a token and features of the position before it."""

    def __init__(
        self,
        specification: Eagle3Specification,
        tensors: Mapping[str, Tensor],
        embedding_table: Tensor,
    ) -> None:
        """tensors: by their names in the files; embedding_table: [vocab, hidden] of the target, for
        heads without one of their own."""
        self.specification = specification
        layer, names, prefix = specification.layer, specification.norms, specification.prefix
        linears = {
            part: Linear.of(each, tensors, "" if part in ("fc", "head") else prefix)
            for part, each in specification.linears.items()
        }
        norms = {part: NormWeights(tensors[name]) for part, name in names.items()}
        of_layer = LayerLinears(*(linears[part] for part in LayerLinears._fields))
        weights = LayerWeights(of_layer, norms["embedding"], norms["mlp"], None, None, None, None)
        self._layer = DecoderLayer(layer, weights)
        self._fc, self._head = linears["fc"], linears["head"]
        for linear in (self._fc, self._head):
            linear.pack()
        self._feature_norm = norm_of(layer.input_norm, norms["features"])
        self._norm = norm_of(layer.input_norm, norms["last"])
        self._embedding = tensors.get("embed_tokens.weight", embedding_table)
        self.dtype, self.device = self._embedding.dtype, self._embedding.device
        self._ids: Tensor | None = None
        if "d2t" in tensors:
            behind = tensors["d2t"].to(torch.int64)
            self._ids = behind + torch.arange(len(behind))
        self._tables: Tables = {}

    @property
    def packed(self) -> bool:
        return all(linear.packed for linear in (self._fc, self._head, *self._layer.linears))

    @property
    def caches(self) -> list[CacheSpecification]:
        """What each layer keeps."""
        return [self.specification.cache]

    def prepare(self, max_positions: int) -> None:
        """Make what a step needs for positions below ``max_positions``."""
        rotary = self.specification.layer.attention.rotary
        if rotary is not None:
            table = cos_sin_table(rotary.dim, max_positions, rotary.parameters, self.device)
            self._tables = {rotary: table}

    def features(self, captured: Mapping[int, Tensor], rows: Tensor | None) -> Tensor:
        """[len(rows), hidden]: of some rows of a step of the target, ``None``: of all; captured: by
        the layer's number, see ``Decoder.captured``."""
        parts = [captured[layer] for layer in self.specification.captured_layers]
        if rows is not None:
            parts = [part.index_select(0, rows) for part in parts]
        return self._fc(torch.cat(parts, -1).to(self.dtype))

    def keep(
        self,
        tokens: Tensor,
        positions: Tensor,
        features: Tensor,
        write: Callable[[Tensor, Tensor], None],
    ) -> None:
        """Have K and V [N, Hkv, D] of rows written. tokens, positions: [N]; features: [N, hidden]
        of the positions before them."""
        _, x = self._inputs(tokens, features)
        _, key, value = self._layer.query_key_value(x, self._tables_at(positions))
        write(key, value)

    def hidden(self, step: StepInputs, features: Tensor) -> Tensor:
        """The layer's result [N, hidden], which stands for the features of its rows' positions
        where nothing better is known. features: [N, hidden] of the positions before them."""
        layer = self._layer
        residual, x = self._inputs(step.tokens, features)
        query, key, value = layer.query_key_value(x, self._tables_at(step.positions))
        residual = layer.add_attention(residual, step.attention(0, query, key, value))
        if layer.mlp_norm is None:
            raise RuntimeError("the layer of an EAGLE-3 head has a norm ahead of its MLP")
        return layer.add_mlp(residual, layer.mlp_norm(residual))

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, vocab of the target] of what ``hidden`` returned."""
        if self._norm is None:
            raise RuntimeError("an EAGLE-3 head has a norm ahead of its LM head")
        logits = self._head(self._norm(hidden))
        if self._ids is None:
            return logits
        whole = logits.new_full((len(logits), self.specification.target_vocab), LOWEST)
        return whole.index_copy_(1, self._ids, logits)

    def _inputs(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Residual stream [N, hidden], and what the layer reads [N, 2 * hidden]."""
        layer = self._layer
        if layer.input_norm is None or self._feature_norm is None:
            raise RuntimeError("the layer of an EAGLE-3 head has two norms ahead of it")
        normed = self._feature_norm(features)
        embedded = layer.input_norm(embedding(tokens, self._embedding))
        residual = normed if self.specification.norm_before_residual else features
        return residual, torch.cat((embedded, normed), -1)

    def _tables_at(self, positions: Tensor) -> Tables:
        return {
            rotary: (rows_at(cos, positions), rows_at(sin, positions))
            for rotary, (cos, sin) in self._tables.items()
        }


def load_eagle3(
    specification: Eagle3Specification, checkpoint: Checkpoint, embedding_table: Tensor
) -> Eagle3Head:
    """Read a head's weights, in the type of the target's. checkpoint: from ``read_eagle3``. Raises
    ``BadModelFolder``."""
    dtype = embedding_table.dtype
    tensors = {
        name: torch.empty(shape, dtype=dtype) for name, shape in specification.shapes.items()
    }
    checkpoint.load(tensors, lambda progress: None, lambda name: name.endswith(".bias"))
    if "d2t" in checkpoint.shapes():
        behind = checkpoint.read("d2t").to(torch.int64)
        ids = behind + torch.arange(len(behind))
        if not bool(((ids >= 0) & (ids < specification.target_vocab)).all()):
            raise BadModelFolder(
                f"{checkpoint.folder}: d2t names tokens beyond the vocabulary of "
                f"{specification.target_vocab}"
            )
        tensors["d2t"] = behind
    with torch.inference_mode():
        return Eagle3Head(specification, tensors, embedding_table)
