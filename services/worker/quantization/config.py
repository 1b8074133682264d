"""``QuantizationConfig``: typed access to ``quantization_config``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.protocol.model_info import BadModelFolder
from penstock.services.worker.quantization.quantization import Pattern

_LONGEST_REGEX = 2048
_MOST_REPEATS = 4
_MOST_NAMES = 100_000
_LARGEST_GROUP = 65_536


class QuantizationConfig:
    """All methods raise ``BadModelFolder`` that names file and key."""

    def __init__(
        self, values: dict[str, Any], path: Path, where: str = "quantization_config"
    ) -> None:
        self._values, self._path, self._where = values, path, where

    @property
    def method(self) -> str:
        return self.text("quant_method", "").lower()

    def error(self, text: str) -> BadModelFolder:
        return BadModelFolder(f"{self._path}: {self._where}: {text}")

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None

    def text(self, key: str, default: str) -> str:
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.error(f"{key} must be a text, got {value!r:.80}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"{key} must be true or false, got {value!r:.80}")
        return value

    def choice(self, key: str, allowed: Sequence[int], default: int | None = None) -> int:
        value = self._values.get(key, default)
        if type(value) is not int or value not in allowed:
            words = " or ".join(map(str, allowed))
            raise self.error(f"{key} must be {words}, got {value!r:.80}")
        return value

    def group(self, key: str, default: int = -1) -> int:
        """Inputs of a group; -1: all of a row."""
        value = self._values.get(key)
        if value is None:
            return default
        if type(value) is not int or not (value == -1 or 16 <= value <= _LARGEST_GROUP):
            raise self.error(f"{key} must be -1 or from 16 on, got {value!r:.80}")
        return value

    def block(self, key: str) -> tuple[int, int] | None:
        value = self._values.get(key)
        if value is None:
            return None
        pair = isinstance(value, list) and len(value) == 2
        if not pair or not all(type(each) is int and 0 < each <= _LARGEST_GROUP for each in value):
            raise self.error(f"{key} must be two positive integers, got {value!r:.80}")
        return value[0], value[1]

    def names(self, key: str) -> tuple[str, ...]:
        value = self._values.get(key)
        if value is None:
            return ()
        texts = isinstance(value, list) and all(isinstance(each, str) for each in value)
        if not texts or len(value) > _MOST_NAMES:
            raise self.error(f"{key} must be a list of names, got {value!r:.80}")
        return tuple(value)

    def nested_names(self, key: str) -> tuple[str, ...]:
        """Of a list of lists of names."""
        value = self._values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise self.error(f"{key} must be a list of lists of names, got {value!r:.80}")
        flat = [name for each in value for name in (each if isinstance(each, list) else [each])]
        return QuantizationConfig({key: flat}, self._path, self._where).names(key)

    def table(self, key: str) -> dict[str, Any]:
        value = self._values.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.error(f"{key} must be an object, got {value!r:.80}")
        return value

    def text_or_flag(self, key: str) -> str:
        """A text, or a flag as one: ``actorder`` was true before it had names."""
        if isinstance(self._values.get(key), bool):
            return "group" if self.flag(key, False) else ""
        return self.text(key, "")

    def within(self, key: str, value: Any) -> QuantizationConfig:
        """What stands below a key."""
        if not isinstance(value, dict):
            raise self.error(f"{key} must hold objects, got {value!r:.80}")
        return QuantizationConfig(value, self._path, f"{self._where}.{key}")

    def regex(self, text: str) -> Pattern:
        """A regular expression that no name takes long to be matched with."""
        bare = re.sub(r"\\.", "", text)
        repeats = len(re.findall(r"[*+{]", bare))
        if len(text) > _LONGEST_REGEX or repeats > _MOST_REPEATS or re.search(r"\)[*+{]", bare):
            raise self.error(
                f"{text!r:.80}: a regular expression with repeated groups or more than "
                f"{_MOST_REPEATS} repeats may take forever, and is not matched"
            )
        try:
            re.compile(text)
        except re.error as failure:
            raise self.error(f"{text!r} is no regular expression: {failure}") from None
        return Pattern(text, "regex")
