"""The type that a checkpoint is computed in unless ``--dtype`` names another."""

from __future__ import annotations

from pathlib import Path

from penstock.protocol.config.machine import Machine
from penstock.protocol.model_info import BadModelFolder, ModelInfo

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""The types that a model may be computed in."""
_NUMBERS_OF_A_BYTE = 2
"""At most, of quantized weights: some formats become plain ones on a CPU."""
_WEIGHTS_SHARE = 0.5
"""Of the memory that is free: what weights in float32 may take where bfloat16 would do."""


def computed_type(info: ModelInfo, cpu: Machine | None = None) -> str:
    """The checkpoint's own, and float32 for float64. Raises ``BadModelFolder`` for another one.

    cpu: the machine whose CPU is to compute. It computes float16 checkpoints in bfloat16, and both
    in float32 if it lacks instructions for bfloat16 and the weights fit. With AVX2 alone a product
    of one row takes 0.8 to 1.3 times as long in bfloat16 as in float32, of 8 rows 3.1 to 4.6
    times, of 64 rows 6.3 to 8.7 times (AMD EPYC, torch 2.13, one thread, 2026-11-25).
    """
    name = info.dtype.removeprefix("torch.")
    if name == "float64":
        return "float32"
    if name not in ITEM_BYTES:
        raise BadModelFolder(
            f"{info.folder / 'config.json'}: dtype {name!r}; supported are "
            f"{', '.join(ITEM_BYTES)} and float64; give the one to compute in with --dtype"
        )
    if cpu is None or name == "float32":
        return name
    room = _WEIGHTS_SHARE * cpu.free_bytes
    stored = _stored_bytes(info.folder)
    if info.config.get("quantization_config"):
        stored *= _NUMBERS_OF_A_BYTE * ITEM_BYTES[name]
    wide = stored * ITEM_BYTES["float32"] // ITEM_BYTES[name]
    return "bfloat16" if cpu.multiplies_bf16 or wide > room else "float32"


def reason_for(chosen: str, stored: str) -> str:
    """Why a checkpoint's type is computed in another one, or that it is its own."""
    if chosen == stored:
        return "dtype in config.json"
    if chosen == "float32":
        return f"config.json says {stored}, for which this CPU has no fast instructions"
    return f"config.json says {stored}, which the CPU lacks"


def _stored_bytes(folder: Path) -> int:
    paths = [path for ending in ("safetensors", "gguf") for path in folder.glob(f"*.{ending}")]
    return sum(path.stat().st_size for path in paths)
