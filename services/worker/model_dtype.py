"""The type that a checkpoint is computed in unless ``--dtype`` names another."""

from __future__ import annotations

from penstock.protocol.model_info import BadModelFolder, ModelInfo

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""The types that a model may be computed in."""


def computed_type(info: ModelInfo) -> str:
    """The checkpoint's own, and float32 for float64. Raises ``BadModelFolder`` for another one."""
    name = info.dtype.removeprefix("torch.")
    if name == "float64":
        return "float32"
    if name not in ITEM_BYTES:
        raise BadModelFolder(
            f"{info.folder / 'config.json'}: dtype {name!r}; supported are "
            f"{', '.join(ITEM_BYTES)} and float64; give the one to compute in with --dtype"
        )
    return name
