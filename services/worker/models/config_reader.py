"""Reads ``config.json`` for the model families, and refuses what they do not implement.

Accepts the layouts of transformers 4 (``rope_theta``, ``rope_scaling``) and 5
(``rope_parameters``, ``layer_types``). Every error names the file, the key and what is supported.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

from penstock.kernels.rope_parameters import ROPE_TYPES, RopeParameters
from penstock.protocol.model_info import BadModelFolder, ModelInfo
from penstock.services.worker.models.specification import (
    Attention,
    Layer,
    Mlp,
    ModelSpecification,
    Norm,
    Rotary,
)

MAX_DIMENSION = 2**24
MAX_LAYERS = 4096
FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of layers, as ``layer_types`` names them."""
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
_DEFAULT_THETA = 10_000.0
_TRAINED = "original_max_position_embeddings"


class ConfigReader:
    """Typed access to a model's ``config.json``. All methods raise ``BadModelFolder``."""

    def __init__(self, info: ModelInfo) -> None:
        self._config = info.config
        self._path = info.folder / "config.json"
        self._max_positions = info.max_model_len
        self._vocab_size = info.vocab_size
        self.hidden_size = self.integer("hidden_size")
        self.num_layers = self.integer("num_hidden_layers")
        if self.num_layers > MAX_LAYERS:
            raise self.error(f"num_hidden_layers {self.num_layers}: at most {MAX_LAYERS}")

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

    def count(self, key: str, default: int) -> int:
        """An integer that may be 0."""
        return 0 if self._config.get(key) == 0 else self.integer(key, default)

    def flag(self, key: str, default: bool) -> bool:
        value = self._config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"{key} must be true or false, got {value!r}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        return self._positive(self._config, key, default)

    def optional(self, key: str, default: float | None = None) -> float:
        """A positive number; 0 for null. ``default``: for an absent key."""
        if key not in self._config and default is not None:
            return default
        return 0.0 if self._config.get(key) is None else self.positive(key)

    def _positive(
        self, table: dict[str, Any], key: str, default: float | None, *, zero_too: bool = False
    ) -> float:
        """``default``: for an absent key, null, and with ``zero_too`` for 0."""
        value = table.get(key)
        if default is not None and (value is None or (zero_too and value == 0)):
            return default
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not math.isfinite(float(value or 0)) or float(value or 0) <= 0:
            raise self.error(f"{key} must be a positive number, got {value!r}")
        return float(value or 0)

    def rms_norm(self, *, default_eps: float = 1e-6, plus_one: bool = False) -> Norm:
        return Norm(self.positive("rms_norm_eps", default_eps), plus_one=plus_one)

    def activation(self, key: str = "hidden_act", default: str = "silu") -> str:
        name = self._config.get(key) or default
        if not isinstance(name, str) or name not in _ACTIVATIONS:
            raise self.error(f"{key} {name!r}: supported are {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[name]

    def mlp(self, *, activation: str | None = None, bias: bool = False, gated: bool = True) -> Mlp:
        """``bias``: of all its linear layers."""
        width = self.integer("intermediate_size")
        return Mlp(width, activation or self.activation(), gated, bias, bias)

    def attention(
        self,
        rotary: Rotary | None,
        *,
        head_dim: int | None = None,
        scale: float | None = None,
        window: int = 0,
        softcap: float = 0.0,
        qk_norm: Norm | None = None,
        qk_norm_over: Literal["head", "each", "all"] = "head",
        qkv_bias: bool = False,
        output_bias: bool = False,
        sinks: bool = False,
    ) -> Attention:
        """``head_dim``: the family's own default (see there); scale: by default 1 / sqrt(D)."""
        heads = self.integer("num_attention_heads")
        kv_heads = self.integer("num_key_value_heads", heads)
        if heads % kv_heads:
            raise self.error(
                f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
            )
        dim = self.head_dim(head_dim)
        return Attention(
            heads, kv_heads, dim, dim**-0.5 if scale is None else scale, rotary, window, softcap,
            qk_norm, qk_norm_over, qkv_bias, output_bias, sinks=sinks,
        )  # fmt: skip

    def head_dim(self, default: int | None = None) -> int:
        """``default``: the family's own; ``None``: hidden_size / num_attention_heads."""
        heads = self.integer("num_attention_heads")
        dim = self.integer("head_dim", default or max(1, self.hidden_size // heads))
        if dim % 2:
            raise self.error(f"head_dim {dim} is odd: rotary embedding needs pairs")
        return dim

    def has(self, key: str) -> bool:
        return self._config.get(key) is not None

    def period(self, key: str, default: int) -> int | None:
        """Every how many layers one is full: a number, or letters as in ``LLLG``; null or 0: no
        layer."""
        value = self._config.get(key, default)
        if isinstance(value, str) and value == "L" * (len(value) - 1) + "G":
            return len(value)
        return None if value is None or value == 0 else self.integer(key, default)

    def flags_of_layers(self, key: str, default: list[int]) -> list[bool]:
        """0 or 1 for each layer."""
        given = self._config.get(key)
        flags = default if given is None else given
        good = isinstance(flags, list) and all(flag in (0, 1) for flag in flags)
        if not good or len(flags) != self.num_layers:
            raise self.error(f"{key} must be 0 or 1 for each of {self.num_layers} layers")
        return [bool(flag) for flag in flags]

    def kinds(self, full_every: int | None = None) -> list[str]:
        """``FULL`` or ``SLIDING`` for each layer: as ``layer_types`` says, else every
        ``full_every``-th is full, with ``None`` no layer."""
        kinds = self._config.get("layer_types")
        if kinds is None:
            every = full_every or self.num_layers + 1
            numbers = range(1, self.num_layers + 1)
            return [FULL if number % every == 0 else SLIDING for number in numbers]
        if not isinstance(kinds, list) or len(kinds) != self.num_layers:
            raise self.error(f"layer_types must name a kind for each of {self.num_layers} layers")
        unknown = [kind for kind in kinds if kind not in (FULL, SLIDING)]
        if unknown:
            raise self.error(f"layer_types: {unknown[0]!r}; supported are {FULL}, {SLIDING}")
        return kinds

    def window(self, default: int | None = None) -> int:
        """The window of the layers that have one; 0 for null, 0 and a window that no sequence can
        fill. ``default``: for an absent key."""
        if "sliding_window" not in self._config and default is not None:
            size = default
        elif self._config.get("sliding_window") in (None, 0):
            return 0
        else:
            size = self.integer("sliding_window")
        return 0 if size >= self._max_positions else size

    def has_window(self, default: int | None = None) -> bool:
        """Whether some layers have a window, however long sequences are."""
        absent = "sliding_window" not in self._config
        return default is not None if absent else bool(self._config["sliding_window"])

    def windows(self, full_every: int | None = None, default: int | None = None) -> list[int]:
        """The window of each layer, 0 for full attention; full_every: see ``kinds``; default: see
        ``window``."""
        kinds = self.kinds(full_every)
        if SLIDING not in kinds:
            return [0] * self.num_layers
        window = self.window(default)
        return [window if kind == SLIDING else 0 for kind in kinds]

    def rotary(
        self,
        *,
        head_dim: int | None = None,
        partial: float | None = None,
        interleaved: bool = False,
        theta: float | None = None,
        trained: int | None = None,
        longrope: tuple[str, ...] = ("su",),
    ) -> Rotary:
        """Rotary embedding of all layers, in either layout of the settings. head_dim: as in
        ``attention``; theta: the base by default; partial: the share of each head that is rotated
        by default, ``None`` for families whose heads are rotated whole; trained: an absent
        ``original_max_position_embeddings``; longrope: other names that the family has for it."""
        table = self._rope_table(trained)
        given = next((k for k in ("rope_type", "type") if table.get(k) is not None), None)
        if given is not None and table[given] in longrope:
            table["rope_type"] = "longrope"
        base = theta or self.positive("rope_theta", _DEFAULT_THETA)
        return self._rotary(table, head_dim, partial, base, interleaved)

    def rotary_of_kinds(
        self, theta: float, local_theta: float, *, head_dim: int | None = None
    ) -> dict[str, Rotary]:
        """Of layers of each kind, for families whose ``rope_parameters`` have settings for each.

        theta, local_theta: bases by default, of layers of full attention and of those with a
        window. ``rope_scaling`` is for the former. As in transformers, settings of no kind count
        for neither, but for YaRN's ``truncate``, which counts there alone.
        """
        settings = self._table(self._config, "rope_parameters")
        full, sliding = (self._table(settings, kind) for kind in (FULL, SLIDING))
        scaling = self._table(self._config, "rope_scaling")
        if scaling and (settings and FULL not in settings):
            raise self.error(f"rope_scaling beside rope_parameters without {FULL}")
        if scaling and scaling.get("rope_type") is None:
            raise self.error("rope_scaling must have a rope_type: versions differ about type alone")
        outer = {"truncate": settings.get("truncate", True)}
        return {
            FULL: self._rotary(full | scaling | outer, head_dim, None, theta),
            SLIDING: self._rotary(sliding | outer, head_dim, None, local_theta),
        }

    def _rotary(
        self,
        table: dict[str, Any],
        head_dim: int | None,
        partial: float | None,
        base: float,
        interleaved: bool = False,
    ) -> Rotary:
        share, key = 1.0, "partial_rotary_factor"
        if partial is not None:
            share = self._positive(table, key, self.positive(key, partial))
        dim = int(self.head_dim(head_dim) * share)
        if share > 1.0 or dim % 2 or not dim:
            raise self.error(
                f"partial_rotary_factor {share}: {dim} of {self.head_dim(head_dim)} elements of a "
                "head; supported are even numbers of them"
            )
        return Rotary(self._rope(table, dim, base), dim, interleaved)

    def _rope(self, table: dict[str, Any], dim: int, base: float) -> RopeParameters:
        """The settings of one embedding of ``dim`` elements."""
        given = [table[key] for key in ("rope_type", "type") if table.get(key) is not None]
        kind = given[0] if given else "default"
        if kind not in ROPE_TYPES:
            raise self.error(
                f"rope type {kind!r} is not supported; supported are {', '.join(ROPE_TYPES)}"
            )
        theta = self._positive(table, "rope_theta", base)
        if kind == "default":
            return RopeParameters(theta)
        if kind == "longrope":
            return self._longrope(table, theta, dim)
        if kind == "yarn":
            return self._yarn(table, theta)
        factor = self._positive(table, "factor", None)
        if kind != "llama3":
            return RopeParameters(theta, kind, factor)
        low = self._positive(table, "low_freq_factor", None)
        high = self._positive(table, "high_freq_factor", None)
        trained = self._trained_positions(table)
        if high <= low:
            raise self.error(f"high_freq_factor {high} must be above low_freq_factor {low}")
        return RopeParameters(theta, kind, factor, low, high, trained)

    def _trained_positions(self, table: dict[str, Any]) -> int:
        trained = int(self._positive(table, _TRAINED, float(self._max_positions)))
        if trained < 2:
            raise self.error(f"{_TRAINED} must be 2 or more, got {trained}")
        return trained

    def _yarn(self, table: dict[str, Any], theta: float) -> RopeParameters:
        trained = self._trained_positions(table)
        if theta <= 1.0:
            raise self.error(f"rope_theta must be above 1 with yarn, got {theta:g}")
        factor = self._positive(table, "factor", self._max_positions / trained)

        def magnitude(weight: float) -> float:
            return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0

        scale = magnitude(1.0)
        if table.get("mscale") and table.get("mscale_all_dim"):
            ours, others = (
                self._positive(table, key, None) for key in ("mscale", "mscale_all_dim")
            )
            scale = magnitude(ours) / magnitude(others)
        return RopeParameters(
            theta,
            "yarn",
            factor,
            original_max_position_embeddings=trained,
            attention_factor=self._positive(table, "attention_factor", scale),
            beta_fast=self._positive(table, "beta_fast", 32.0, zero_too=True),
            beta_slow=self._positive(table, "beta_slow", 1.0, zero_too=True),
            truncate=bool(table.get("truncate", True)),
        )

    def _longrope(self, table: dict[str, Any], theta: float, dim: int) -> RopeParameters:
        trained = self._trained_positions(table)
        factor = self._positive(table, "factor", self._max_positions / trained)
        scale = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1.0 else 1.0
        factors = []
        for key in ("short_factor", "long_factor"):
            given = table.get(key)
            numbers = given if isinstance(given, list) else []
            good = all(isinstance(n, int | float) and math.isfinite(n) and n > 0 for n in numbers)
            if len(numbers) != dim // 2 or not good:
                raise self.error(f"{key} must be {dim // 2} positive numbers")
            factors.append(tuple(float(n) for n in numbers))
        return RopeParameters(
            theta,
            "longrope",
            factor,
            original_max_position_embeddings=trained,
            attention_factor=self._positive(table, "attention_factor", scale),
            short_factors=factors[0],
            long_factors=factors[1],
        )

    def _rope_table(self, trained: int | None) -> dict[str, Any]:
        """Settings of all layers: in ``rope_scaling``, else in ``rope_parameters``. The trained
        length counts that stands beside them, then the one within, then ``trained``."""
        scaling = self._table(self._config, "rope_scaling")
        table = scaling or self._table(self._config, "rope_parameters")
        kinds = [key for key, value in table.items() if isinstance(value, dict)]
        if kinds:
            raise self.error(
                f"rotary settings for {', '.join(kinds)}: this architecture has one for all layers"
            )
        beside = self._config.get(_TRAINED) or trained
        return table | ({_TRAINED: beside} if beside is not None else {})

    def _table(self, config: dict[str, Any], key: str) -> dict[str, Any]:
        """A copy of an object; empty for an absent one and null."""
        table = config.get(key)
        if table is not None and not isinstance(table, dict):
            raise self.error(f"{key} must be an object, got {table!r}")
        return dict(table or {})

    def model(
        self,
        layers: Iterable[Layer],
        norm: Norm,
        *,
        tied: bool = False,
        embedding_multiplier: float = 1.0,
        logit_multiplier: float = 1.0,
        logit_softcap: float = 0.0,
        multiplies_inputs: bool = False,
    ) -> ModelSpecification:
        """``tied``: what an absent ``tie_word_embeddings`` means."""
        return ModelSpecification(
            self._vocab_size, self.hidden_size, tuple(layers), norm,
            self.flag("tie_word_embeddings", tied), embedding_multiplier, logit_multiplier,
            logit_softcap, multiplies_inputs=multiplies_inputs,
        )  # fmt: skip
