"""What lies where in the memory of held weights, as data."""

from __future__ import annotations

import msgspec

from penstock.services.worker.memory_account import MemoryAccount
from penstock.services.worker.models.adapter import TensorNames
from penstock.services.worker.models.dense import DenseConfig
from penstock.services.worker.models.specification import ModelSpecification


class BadManifest(ValueError):
    """It does not fit the memory or the model."""


class HeldPiece(msgspec.Struct, frozen=True, array_like=True):
    """Memory behind one descriptor."""

    num_bytes: int
    checksum: int
    """Of its content, where others than who made it could have changed that; else 0."""


class HeldTensor(msgspec.Struct, frozen=True, array_like=True):
    """Contiguous."""

    dtype: str
    shape: tuple[int, ...]
    piece: int
    offset: int
    """Bytes from the piece's beginning."""


class HeldTuple(msgspec.Struct, frozen=True, array_like=True):
    """A named tuple of tensors and numbers: a form of a weight."""

    kind: str
    """Its class, or ``plain``."""
    tensors: dict[str, int]
    """Numbers of tensors by the names of fields."""
    values: dict[str, int | str]


class HeldLinear(msgspec.Struct, frozen=True, array_like=True):
    """A linear layer."""

    tensors: dict[str, int]
    """``weight``, unless it is quantized, and ``bias``."""
    pieces: list[HeldTuple] = []
    """Of a quantized one."""
    compressed: HeldTuple | None = None


class HeldLayer(msgspec.Struct, frozen=True, array_like=True):
    linears: list[HeldLinear]
    """In the order of ``LayerLinears``."""
    tensors: dict[str, int]
    """All others, by the names of fields; of a norm with ``.weight`` or ``.bias`` behind it."""


class HeldModel(msgspec.Struct, frozen=True, array_like=True):
    """A model, layers and all that is needed to compute it beside ``config.json``."""

    specification: ModelSpecification
    names: TensorNames
    dtype: str
    dense: DenseConfig | None
    """Of a model in the form of the kernels for GPUs, whose layers are those of ``DenseWeights``;
    ``None``: they are those of ``DecoderWeights``."""
    layers: list[HeldLayer]
    tensors: dict[str, int]
    """``embedding``, ``norm.weight``, ``norm.bias``."""
    lm_head: HeldLinear
    compression: str = ""
    """``Compression.summary``; empty: nobody thought of it."""


class HeldKV(msgspec.Struct, frozen=True, array_like=True):
    """KV memory behind one more descriptor: the last one."""

    num_bytes: int
    engine: str
    """Whose it is: of several on one device each has its own."""


class Manifest(msgspec.Struct, frozen=True, array_like=True):
    model: HeldModel
    placed: list[HeldTensor]
    pieces: list[HeldPiece]
    account: MemoryAccount | None
    """Of the worker that made the weights, where another one can take it over."""
    kv: HeldKV | None = None
    """Planned by that account; ``None``: none is held."""

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @property
    def num_bytes(self) -> int:
        """Of weights."""
        return sum(piece.num_bytes for piece in self.pieces)


def decode_manifest(data: bytes) -> Manifest:
    """Raises ``BadManifest``."""
    try:
        return msgspec.msgpack.decode(data, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadManifest(str(error)) from None
