"""GGUF: each tensor of a file has its own kind of blocks, the embedding too.

In files of Llama's architecture rows of queries and keys lie as pairs that are rotated together
(llama.cpp, ``convert_hf_to_gguf.py``, ``permute``); they are brought back into halves.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from penstock.protocol.model_info import BadModelFolder, ModelInfo
from penstock.services.worker.gguf_file import BLOCKS, read_gguf
from penstock.services.worker.quantization.format import (
    WEIGHT,
    Axis,
    Form,
    Format,
    StoredTensor,
    plain_tensor,
)
from penstock.services.worker.quantization.quantization import Quantization

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.kernels.quantized_weight import QuantizedWeight

_PAIRED = "llama"
_FORMS = {
    "Q4_0": Form("int4", 32, 1, 2), "Q4_1": Form("int4", 32, 1, 2, True, offsets=True),
    "Q5_0": Form("int8", 32, 1, 2), "Q5_1": Form("int8", 32, 1, 2, offsets=True),
    "Q8_0": Form("int8", 32, 1, 2), "Q4_K": Form("int4", 32, 1, 4, True, offsets=True),
    "Q5_K": Form("int8", 32, 1, 4, offsets=True), "Q6_K": Form("int8", 16, 1, 4),
}  # fmt: skip


class GgufFormat(Format, frozen=True):
    kind: str
    """A key of ``BLOCKS``, or a plain type."""
    heads: int = 0
    """Heads whose rows lie in pairs; 0: rows lie as they are."""

    @property
    def title(self) -> str:
        return f"GGUF {self.kind}"

    def why_not(self, outputs: int, inputs: int) -> str:
        if self.kind in BLOCKS and inputs % BLOCKS[self.kind][0]:
            return f"{inputs} inputs are no blocks of {BLOCKS[self.kind][0]}"
        pairs = not self.heads or outputs % (2 * self.heads) == 0
        return "" if pairs else f"{outputs} outputs are no pairs of {self.heads} heads"

    def tensors(self, outputs: int, inputs: int) -> dict[str, StoredTensor]:
        if self.kind not in BLOCKS:
            plain = plain_tensor(outputs, inputs)
            return {WEIGHT: replace(plain, axes=(self._rows(outputs), *plain.axes[1:]))}
        numbers, size = BLOCKS[self.kind]
        shape = (outputs, inputs // numbers * size)
        axes = (self._rows(outputs), Axis("inputs", numbers, size))
        return {WEIGHT: StoredTensor((shape,), (self.kind,), "codes", of=self.title, axes=axes)}

    def _rows(self, outputs: int) -> Axis:
        """Pairs lie within a head."""
        dim = outputs // self.heads if self.heads else 1
        return Axis("outputs", dim, dim)

    def of_part(self, outputs: int, own: int) -> GgufFormat:
        return replace(self, heads=self.heads * own // outputs)

    def form(self, outputs: int, inputs: int) -> Form | None:
        return _FORMS.get(self.kind)

    def weight(
        self, tensors: Mapping[str, Tensor], outputs: int, inputs: int
    ) -> QuantizedWeight | Tensor:
        import torch

        from penstock.kernels.gguf_blocks import weight_of_blocks

        stored = tensors[WEIGHT]
        order = None
        if self.heads:
            order = torch.arange(outputs, device=stored.device)
            order = order.view(self.heads, -1, 2).transpose(1, 2).reshape(-1)
        if self.kind not in BLOCKS:
            return stored if order is None else stored[order]
        made = weight_of_blocks(self.kind, stored)
        return made if order is None else made.reordered(order)


def gguf_quantization(path: Path, info: ModelInfo) -> Quantization:
    """Raises ``BadModelFolder``."""
    file = read_gguf(path)
    paired = file.architecture == _PAIRED
    heads = {}
    if paired:
        heads["q_proj"] = _heads(info, "num_attention_heads")
        heads["k_proj"] = _heads(info, "num_key_value_heads", heads["q_proj"])
        if any(name.endswith(("q_proj.bias", "k_proj.bias")) for name in file.entries):
            raise BadModelFolder(f"{path}: biases of queries in pairs are not read")
    named: dict[str, Format] = {}
    for name, entry in file.entries.items():
        module, last = name.removesuffix(WEIGHT), name.removesuffix(WEIGHT).rsplit(".", 1)[-1]
        if entry.dtype in BLOCKS or last in heads:
            named[module] = GgufFormat(entry.dtype, heads.get(last, 0))
    return Quantization("gguf", (), named=named)


def _heads(info: ModelInfo, key: str, default: int = 0) -> int:
    value = info.config.get(key)
    if value is None and default:
        return default
    if type(value) is not int or value <= 0:
        raise BadModelFolder(f"{info.folder / 'config.json'}: {key} must be a positive integer")
    return value
