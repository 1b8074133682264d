"""``adapter_config.json`` of a PEFT folder: how large an adapter's layers are, and their scales.

Hu et al., "LoRA" (arXiv 2106.09685): y = W x + (alpha / r) B A x; rsLoRA (arXiv 2312.03732) divides
by the root of r. The keys are those of peft's ``LoraConfig``. What would change the result in any
other way is refused by its name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from penstock.protocol.model_info import BadModelFolder, read_json
from penstock.protocol.shown_values import show

Number = TypeVar("Number", int, float)
CONFIG = "adapter_config.json"
MAX_RANK = 512
MAX_ALPHA = 1e6
"""Either way; what is larger leaves the range of weights anyway."""
_HARMLESS = frozenset(
    {
        "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "ensure_weight_tying",
        "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern",
        "layers_to_transform", "lora_alpha", "lora_dropout", "peft_type", "peft_version", "r",
        "rank_pattern", "revision", "runtime_config", "target_modules", "task_type", "use_rslora",
        "qalora_group_size", "megatron_core", "eva_config",
    }
)  # fmt: skip
"""What is read below, or says nothing of a trained adapter. Its tensors say which layers it has."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that subtract the adapter's beginning from the weights of the base."""
SOFT_PROMPT = "PROMPT_TUNING"
_OTHER_KINDS = {
    "P_TUNING": ", a soft prompt: virtual tokens that a network of its own makes",
    "MULTITASK_PROMPT_TUNING": ", a soft prompt that differs from task to task",
    "CPT": ", a soft prompt made of tokens that are given",
    "PREFIX_TUNING": ", which puts keys and values of its own in front of each layer's",
}
"""What adapters have that are neither low-rank matrices nor virtual tokens alone."""
_LITERAL = re.compile(r"\^?[A-Za-z0-9_.\\]+\$?")


class PeftConfig(msgspec.Struct, frozen=True):
    """What an adapter's configuration says of its layers."""

    rank: int
    alpha: float
    by_root: bool
    """Whether alpha is divided by the root of the rank (rsLoRA)."""
    ranks: dict[str, int]
    """Of the modules whose names end in a pattern; see ``_matches``."""
    alphas: dict[str, float]

    def rank_of(self, module: str) -> int:
        """module: its whole name in the model, ``model.layers.0.self_attn.q_proj``."""
        return _by_pattern(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        """What B A x is multiplied by."""
        rank, alpha = self.rank_of(module), _by_pattern(self.alphas, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.by_root else rank)


def read_settings(path: Path) -> dict[str, Any]:
    """The object in a configuration. Raises ``BadModelFolder``."""
    raw = read_json(path)
    if not isinstance(raw, dict):
        raise BadModelFolder(f"{path}: no JSON object")
    return raw


def read_peft_config(folder: Path) -> PeftConfig:
    """Raises ``BadModelFolder`` that names the file, the key and the value."""
    path = folder / CONFIG
    raw = read_settings(path)
    kind = raw.get("peft_type")
    if kind != "LORA":
        why = _OTHER_KINDS.get(kind, "") if isinstance(kind, str) else ""
        raise BadModelFolder(
            f"{path}: peft_type is {show(kind)}{why}; LORA and {SOFT_PROMPT} are supported"
        )
    if reason := _unsupported(raw):
        raise BadModelFolder(f"{path}: {reason}")
    rank, alpha = _rank(raw.get("r"), "r", path), _alpha(raw.get("lora_alpha"), "lora_alpha", path)
    ranks, alphas = (_pattern(raw, key, path) for key in ("rank_pattern", "alpha_pattern"))
    return PeftConfig(
        rank,
        alpha,
        _by_root(raw.get("use_rslora"), path),
        {name: _rank(one, name, path) for name, one in ranks.items()},
        {name: _alpha(one, name, path) for name, one in alphas.items()},
    )


def _rank(value: Any, key: str, path: Path) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise BadModelFolder(f"{path}: rank {key} is {show(value)}; 1 to {MAX_RANK} are allowed")
    return value


def _alpha(value: Any, key: str, path: Path) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not -MAX_ALPHA <= value <= MAX_ALPHA:
        raise BadModelFolder(
            f"{path}: {key} is {show(value)}; it must be a finite number from -{MAX_ALPHA:g} to "
            f"{MAX_ALPHA:g}"
        )
    return float(value)


def _by_root(value: object, path: Path) -> bool:
    if value is not None and not isinstance(value, bool):
        raise BadModelFolder(f"{path}: use_rslora is {show(value)}; true or false are allowed")
    return bool(value)


def _unsupported(raw: Mapping[str, Any]) -> str:
    """What is not supported of a configuration, in words; empty: all is."""
    if raw.get("bias", "none") != "none":
        return f"bias is {show(raw['bias'])}; adapters without biases (none) are supported"
    if raw.get("task_type") not in (None, "CAUSAL_LM"):
        return f"task_type is {show(raw['task_type'])}; CAUSAL_LM alone is supported"
    begun = raw.get("init_lora_weights")
    if begun is not None and not isinstance(begun, bool | str):
        return f"init_lora_weights is {show(begun)}; true, false or a name are allowed"
    if isinstance(begun, str) and begun.lower().startswith(_CHANGES_BASE):
        return (
            f"init_lora_weights is {show(begun)}, which has changed the weights of the base; save "
            "it with path_initial_model_for_weight_conversion, which makes a plain LoRA of it"
        )
    if raw.get("use_dora"):
        return "use_dora is true: DoRA is not supported; merge the adapter into the checkpoint"
    for key, value in raw.items():
        if key not in _HARMLESS and value:
            return f"{show(key)} is {show(value)}, which is not supported"
    return ""


def _pattern(raw: Mapping[str, Any], key: str, path: Path) -> dict[str, Any]:
    found = raw.get(key) or {}
    if not isinstance(found, dict):
        raise BadModelFolder(f"{path}: {key} is no object")
    for name in found:
        if not _LITERAL.fullmatch(name):
            raise BadModelFolder(
                f"{path}: {key} has the pattern {show(name)}; names of modules alone are supported"
            )
    return found


def _by_pattern(patterns: Mapping[str, Number], module: str, otherwise: Number) -> Number:
    """The value of the first pattern that a module matches."""
    return next((value for key, value in patterns.items() if _matches(key, module)), otherwise)


def _matches(pattern: str, module: str) -> bool:
    """Whether a module is meant by a pattern: it has that name, or ends with it behind a dot. What
    begins with ``^`` is its whole name."""
    whole = pattern.startswith("^")
    name = pattern.removeprefix("^").removesuffix("$").replace("\\.", ".")
    return module == name or (not whole and module.endswith("." + name))
