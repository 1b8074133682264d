"""Reads ``config.json`` for the model families, and refuses what they do not implement.

Accepts the layouts of transformers 4 (``rope_theta``, ``rope_scaling``) and 5
(``rope_parameters``, ``layer_types``). Every error names the file, the key and what is supported.
"""

from __future__ import annotations

import math
from typing import Any

from penstock.kernels.rotary import ROPE_TYPES, RopeParameters
from penstock.protocol.model_info import BadModelFolder, ModelInfo

MAX_DIMENSION = 2**24
_SILU = ("silu", "swish")
_DEFAULT_THETA = 10_000.0


class ConfigReader:
    """Typed access to a model's ``config.json``. All methods raise ``BadModelFolder``."""

    def __init__(self, info: ModelInfo) -> None:
        self._config = info.config
        self._path = info.folder / "config.json"
        self._max_positions = info.max_model_len

    def error(self, text: str) -> BadModelFolder:
        return BadModelFolder(f"{self._path}: {text}")

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer; ``default`` stands for an absent key or null."""
        value = self._config.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < MAX_DIMENSION:
            raise self.error(f"{key} must be a positive integer, got {value!r}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"{key} must be true or false, got {value!r}")
        return value

    def positive(self, key: str, default: float) -> float:
        return self._positive(self._config, key, default)

    def _positive(self, table: dict[str, Any], key: str, default: float | None) -> float:
        value = table.get(key)
        if value is None and default is not None:
            return default
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not math.isfinite(float(value or 0)) or float(value or 0) <= 0:
            raise self.error(f"{key} must be a positive number, got {value!r}")
        return float(value or 0)

    def refuse_unsupported(self) -> None:
        """Features of which any use would change the model's output."""
        if self._config.get("quantization_config") is not None:
            raise self.error(
                "quantization_config: quantized checkpoints are not supported; "
                "use one in float32, bfloat16 or float16"
            )
        activation = self._config.get("hidden_act", "silu")
        if activation not in _SILU:
            raise self.error(f"hidden_act {activation!r}: supported is silu")
        if float(self.positive("partial_rotary_factor", 1.0)) != 1.0:
            raise self.error("partial_rotary_factor: only 1 is supported")

    def refuse_sliding_window(self, num_layers: int) -> None:
        """A sliding window that some layer would really use."""
        window = self._config.get("sliding_window")
        kinds = self._config.get("layer_types")
        if isinstance(kinds, list):
            used = any(kind != "full_attention" for kind in kinds)
        else:
            first = self._config.get("max_window_layers")
            beyond = not isinstance(first, int) or first < num_layers
            used = bool(self._config.get("use_sliding_window", False)) and beyond
        if used and not (isinstance(window, int) and window >= self._max_positions):
            raise self.error(
                f"sliding_window {window!r} is used by some layers; "
                "supported is full attention in every layer"
            )

    def rope(self) -> RopeParameters:
        """Rotary embedding in either layout."""
        table = self._rope_table()
        kind = table.get("rope_type", table.get("type", "default"))
        if kind not in ROPE_TYPES:
            raise self.error(
                f"rope type {kind!r} is not supported; supported are {', '.join(ROPE_TYPES)}"
            )
        if self._positive(table, "partial_rotary_factor", 1.0) != 1.0:
            raise self.error("partial_rotary_factor: only 1 is supported")
        theta = self._positive(table, "rope_theta", self.positive("rope_theta", _DEFAULT_THETA))
        if kind == "default":
            return RopeParameters(theta)
        factor = self._positive(table, "factor", None)
        if kind != "llama3":
            return RopeParameters(theta, kind, factor)
        low = self._positive(table, "low_freq_factor", None)
        high = self._positive(table, "high_freq_factor", None)
        trained = int(self._positive(table, "original_max_position_embeddings", None))
        if high <= low:
            raise self.error(f"high_freq_factor {high} must be above low_freq_factor {low}")
        return RopeParameters(theta, kind, factor, low, high, trained)

    def _rope_table(self) -> dict[str, Any]:
        for key in ("rope_parameters", "rope_scaling"):
            table = self._config.get(key)
            if table is None:
                continue
            if not isinstance(table, dict):
                raise self.error(f"{key} must be an object, got {table!r}")
            if any(isinstance(value, dict) for value in table.values()):
                raise self.error(f"{key}: one setting for all layers is supported, not several")
            return table
        return {}
