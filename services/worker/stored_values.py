"""What is looked at of quantized weights before memory is taken: layers' sizes, and small tensors.

Scales must be finite and not negative, groups of inputs complete; what is wrong is named.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from penstock.protocol.model_info import BadModelFolder
from penstock.services.worker.checkpoint import Checkpoint
from penstock.services.worker.file_slices import FileSlice
from penstock.services.worker.models.linear_specification import LinearSpecification, ModelLinears
from penstock.services.worker.quantization.format import StoredTensor
from penstock.services.worker.safetensors_file import listed

_LARGEST = 1e6
"""No sound scale of a weight is larger: numbers of models are below 100."""


def stored_tensors(linears: ModelLinears, layer_prefix: str) -> dict[str, StoredTensor]:
    """All that files hold of quantized weights; layer_prefix: of names, with a place for the
    layer's number."""
    found = linears.head.stored_tensors("")
    for index, layer in enumerate(linears.layers):
        for linear in layer:
            found |= linear.stored_tensors(layer_prefix.format(index))
    return found


def check_sizes(linears: ModelLinears, layer_prefix: str) -> None:
    """Whether layers may be stored in their formats. Raises ``BadModelFolder`` that names them."""
    wrong = list(_unfit(linears.head, ""))
    for index, layer in enumerate(linears.layers):
        for linear in layer:
            wrong += _unfit(linear, layer_prefix.format(index))
    if wrong:
        raise BadModelFolder(f"layers that are not stored as said: {listed(wrong)}")


def _unfit(linear: LinearSpecification, prefix: str) -> Iterator[str]:
    for (name, outputs), format in zip(linear.stored.items(), linear.formats, strict=False):
        reason = format.why_not(outputs, linear.inputs) if format is not None else ""
        if format is not None and reason:
            yield f"{prefix}{name} as {format.title}: {reason}"


def check_values(
    checkpoint: Checkpoint,
    stored: Mapping[str, StoredTensor],
    own: Iterable[FileSlice] | None = None,
) -> None:
    """Read what is small of quantized weights, one tensor after the other: scales must be finite
    and not negative, groups of inputs complete. ``Checkpoint.check`` comes first. own: what a rank
    reads of them; orders are read whole.

    Raises one ``BadModelFolder`` that names the tensors.
    """
    parts = defaultdict[str, list[FileSlice]](list)
    for each in own or ():
        parts[each.name].append(each)
    wrong = []
    for name, tensor in stored.items():
        if tensor.role not in ("scales", "factor", "order", "shape") or name not in checkpoint:
            continue
        if own is not None and name not in parts:
            continue
        whole = own is None or tensor.role == "order"
        for part in [None] if whole else parts[name]:
            reason = _why_wrong(checkpoint.read(name, part and part.ranges), tensor)
            if reason:
                wrong.append(f"{checkpoint.place(name)}: {reason}")
                break
    if wrong:
        raise BadModelFolder(
            f"{checkpoint.folder}: tensors with values that cannot be: {listed(wrong)}; the files "
            "are damaged, or quantization_config is another model's: fetch them again"
        )


def _why_wrong(values: Tensor, tensor: StoredTensor) -> str:
    if tensor.role == "order":
        return _wrong_order(values, tensor.group)
    if tensor.role == "shape":
        found, wanted = values.tolist(), list(tensor.says)
        return "" if found == wanted else f"{found} for a weight of {wanted}"
    if values.dtype == torch.uint8:  # e8m0
        return "NaN" if bool((values == 255).any()) else ""
    values = values.float()
    if not bool(values.isfinite().all()):
        return "NaN" if bool(values.isnan().any()) else "infinity"
    if bool((values < 0).any()):
        return f"a scale of {values.min().item():g}"
    if tensor.role == "scales" and values.max().item() > _LARGEST:
        return f"a scale of {values.max().item():g}"
    if tensor.role == "factor" and not bool((values > 0).all()):
        return "a scale of 0"
    return ""


def _wrong_order(groups: Tensor, size: int) -> str:
    """groups: of each input; size: inputs of a group, -1 for all."""
    count = 1 if size < 0 else -(-len(groups) // size)
    lowest, highest = int(groups.min()), int(groups.max())
    if lowest < 0 or highest >= count:
        return f"inputs of groups {lowest} to {highest}; there are {count}"
    held = torch.bincount(groups.long(), minlength=count)
    most = len(groups) if size < 0 else size
    full = bool((held[:-1] == most).all())
    if not full or int(held[-1]) != len(groups) - most * (count - 1):
        return f"groups of {int(held.min())} to {int(held.max())} inputs, not of {most}"
    return ""
