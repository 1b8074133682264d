"""The tasks that a model's folder decides on, as a worker does them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from penstock.protocol.model_info import BadModelFolder, ModelInfo, read_text
from penstock.protocol.pooling import DenseModule, Pooling
from penstock.protocol.tasks import CLASSIFY
from penstock.services.worker.checkpoint import Checkpoint
from penstock.services.worker.pooling import BatchTask, PromptTask, States, floats

if TYPE_CHECKING:
    from torch import Tensor

Matrix = npt.NDArray[np.float32]
RANDOM_STD = 0.02


Wide = npt.NDArray[np.float64]


def _gelu(x: Wide) -> Wide:
    import torch

    found: Wide = torch.nn.functional.gelu(torch.from_numpy(x)).numpy()
    return found


_ACTIVATIONS: dict[str, Callable[[Wide], Wide]] = {
    "identity": lambda x: x,
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0.0),
    "gelu": _gelu,
}


class Layer:
    """activation(W x + b), in float64: a prompt's numbers, rounded to float32, do not depend on
    how many others are multiplied with it."""

    def __init__(
        self, weight: Matrix, bias: States | None = None, activation: str = "identity"
    ) -> None:
        """weight: [out, in]; bias: [out]."""
        self._weight = weight.astype(np.float64).T
        self._bias = None if bias is None else bias.astype(np.float64)
        self._activate = _ACTIVATIONS[activation]

    def __call__(self, x: Wide) -> Wide:
        """[prompts, out] of [prompts, in]."""
        product = x @ self._weight
        return self._activate(product if self._bias is None else product + self._bias)


class LayersTask(BatchTask):
    """A task whose payload is a prompt's state behind some layers."""

    def __init__(self, name: str, layers: Sequence[Layer] = ()) -> None:
        self.name = name
        self._layers = layers

    def transformed(self, states: States) -> States:
        if not self._layers:
            return states
        wide = states.astype(np.float64)
        for layer in self._layers:
            wide = layer(wide)
        return wide.astype(np.float32)


class NullTask:
    """On the null device: what stands for a state, or numbers of the first of it for logits."""

    def __init__(self, name: str, count: int) -> None:
        """count: of logits; 0: all of the state."""
        self.name = name
        self._count = count

    def pool(self, hidden: States) -> bytes:
        if not self._count:
            return floats(hidden)
        logits = np.cos(hidden[0] + np.arange(self._count, dtype=np.float32))
        return floats(logits.astype(np.float32))


def null_tasks(pooling: Pooling) -> dict[str, PromptTask]:
    """The folder's tasks without a model."""
    counts = {CLASSIFY: len(pooling.labels)}
    counts["score"] = max(1, len(pooling.labels))
    return {name: NullTask(name, counts.get(name, 0)) for name in pooling.tasks}


def folder_tasks(
    pooling: Pooling, layers: Sequence[Layer] = (), *, random: bool = False
) -> dict[str, PromptTask]:
    """The folder's tasks. layers: what makes logits of a pooled state; vectors have those of the
    folder. random: their weights are drawn, not read. Raises ``BadModelFolder``."""
    behind = [*layers, *(dense_layer(module, random=random) for module in pooling.dense)]
    return {name: LayersTask(name, behind) for name in pooling.tasks}


def dense_layer(module: DenseModule, *, random: bool = False) -> Layer:
    """Read a dense module of sentence-transformers."""
    sizes = module.out_features, module.in_features
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": sizes}
    if module.bias:
        shapes["linear.bias"] = sizes[:1]
    found = read_tensors(module.folder, shapes, random=random)
    return Layer(found["linear.weight"], found.get("linear.bias"), module.activation)


def classifier_layer(info: ModelInfo, labels: int, hidden: int, *, random: bool = False) -> Layer:
    """The head of a decoder that classifies: logits of the last token's state."""
    name, shape = "score.weight", (labels, hidden)
    return Layer(read_tensors(info.folder, {name: shape}, others=True, random=random)[name])


def read_tensors(
    folder: Path,
    shapes: dict[str, tuple[int, ...]],
    *,
    others: bool = False,
    random: bool = False,
) -> dict[str, Matrix]:
    """Tensors of a folder's checkpoint in float32. others: it may hold more. random: they are
    drawn, and no checkpoint is needed. Raises ``BadModelFolder``."""
    if random:
        draw = np.random.default_rng(0)
        return {
            name: (RANDOM_STD * draw.standard_normal(shape)).astype(np.float32)
            for name, shape in shapes.items()
        }
    import torch

    checkpoint = Checkpoint(folder)
    checkpoint.check(shapes, lambda name: others)
    targets = {name: torch.empty(shape, dtype=torch.float32) for name, shape in shapes.items()}
    checkpoint.load(targets, lambda note: None, lambda name: True)
    return {name: tensor.numpy() for name, tensor in targets.items()}


def token_ids(folder: Path, texts: Sequence[str]) -> list[int]:
    """Of texts that are one token each. Raises ``BadModelFolder`` where the vocabulary lacks
    one."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_str(read_text(path).decode())
    found = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    for text, ids in zip(texts, found, strict=True):
        if len(ids) != 1:
            raise BadModelFolder(f"{path}: no token is {text!r}, which --task score judges by")
    return [ids[0] for ids in found]


def judge_layer(rows: Tensor) -> Layer:
    """Logits of some tokens. rows: of the LM head for them, [tokens, hidden] fp32."""
    return Layer(rows.cpu().numpy())
