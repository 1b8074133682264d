"""What the files of a checkpoint hold where they differ from what its ``config.json`` says.

As transformers reads them: a model whose LM head is said to be its embedding has one of its own if
both are stored and differ; if one of the two is stored, it is both; and names may lack the prefix
``model.``, as in folders written from the model without its head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from msgspec.structs import replace

from penstock.services.worker.checkpoint import Checkpoint
from penstock.services.worker.models.adapter import TensorNames
from penstock.services.worker.models.specification import ModelSpecification

_PREFIX = "model."


class StoredForm(NamedTuple):
    model: ModelSpecification
    names: TensorNames
    notes: list[str]
    """What differs in a way that people should know."""


def as_stored(model: ModelSpecification, names: TensorNames, checkpoint: Checkpoint) -> StoredForm:
    """The model and the names of its tensors, as the files have them.

    An LM head that is said to be the embedding is compared with it: read up to the first
    difference. Raises ``BadModelFolder`` for files that cannot be read.
    """
    shapes = checkpoint.shapes()
    names = _without_prefix(names, shapes)
    embedding, head = f"{names.embedding}.weight", f"{names.lm_head}.weight"
    if not model.tie_word_embeddings or head not in shapes:
        return StoredForm(model, names, [])
    if embedding not in shapes:
        return StoredForm(model, replace(names, embedding=names.lm_head), [])
    if checkpoint.equal(embedding, head):
        return StoredForm(model, names, [])
    note = (
        f"tie_word_embeddings is true, but {head} differs from {embedding}: both are used; set "
        "tie_word_embeddings to false in config.json to say so"
    )
    return StoredForm(replace(model, tie_word_embeddings=False), names, [note])


def _without_prefix(names: TensorNames, shapes: Mapping[str, object]) -> TensorNames:
    bare = names.embedding.removeprefix(_PREFIX)
    if f"{names.embedding}.weight" in shapes or f"{bare}.weight" not in shapes:
        return names
    norm, layer = names.norm.removeprefix(_PREFIX), names.layer.removeprefix(_PREFIX)
    return replace(names, embedding=bare, norm=norm, layer=layer)
