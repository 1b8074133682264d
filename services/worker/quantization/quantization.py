"""``Quantization``: which linear layers of a model are quantized, and in which format each."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import msgspec

from penstock.services.worker.quantization.format import Format

_LINEAR = "Linear"
_UNUSED = (
    ".k_scale", ".v_scale", ".q_scale", ".prob_scale", ".output_scale", ".k_zero_point",
    ".v_zero_point",
)  # fmt: skip
"""Scales of caches and outputs, which stay in the model's type."""
HEAD = "lm_head"


class Pattern(msgspec.Struct, frozen=True):
    """Which names of modules are meant."""

    text: str
    kind: Literal["name", "regex", "part", "wildcard"] = "name"
    """``part``: the text is in the name, between dots."""

    def matches(self, name: str) -> bool:
        match self.kind:
            case "name":
                return name == self.text or name.endswith(f".{self.text}")
            case "regex":
                return re.match(self.text, name) is not None
            case "part":
                return f".{self.text}." in f".{name}."
            case "wildcard":
                return fnmatch.fnmatchcase(name, self.text)


class FormatGroup(msgspec.Struct, frozen=True):
    """Modules that have one format."""

    targets: tuple[Pattern, ...]
    """Empty: all linear layers."""
    format: Format | None
    """``None``: they are plain."""

    def matches(self, name: str) -> bool:
        return not self.targets or any(each.matches(name) for each in self.targets)


class Quantization(msgspec.Struct, frozen=True):
    """Of a folder, or of ``--quantization``."""

    method: str
    """As ``quant_method`` names it."""
    groups: tuple[FormatGroup, ...]
    """The first that matches a name says its format."""
    ignored: tuple[Pattern, ...] = ()
    """Names that are plain whatever the groups say."""
    online: bool = False
    """Whether weights are quantized while they are read."""
    named: Mapping[str, Format] = MappingProxyType({})
    """Formats of modules by their names, in place of groups; not of linear layers alone."""

    def format_of(self, name: str) -> Format | None:
        """Of a linear layer by its name in the checkpoint; ``None``: it is plain."""
        if self.named:
            return self.named.get(name)
        if any(each.matches(name) for each in self.ignored):
            return None
        return next((group.format for group in self.groups if group.matches(name)), None)

    def without_head(self) -> Quantization:
        """With a plain LM head."""
        named = {name: each for name, each in self.named.items() if name != HEAD}
        ignored = (*self.ignored, Pattern(HEAD))
        return msgspec.structs.replace(self, ignored=ignored, named=named)

    def is_unused(self, name: str) -> bool:
        """Whether a tensor of a quantized checkpoint is none that a layer needs."""
        return not self.online and name.endswith(_UNUSED)

    @property
    def title(self) -> str:
        """What the layers are, for people: ``GPTQ, 4 bits in groups of 128``."""
        formats = [group.format for group in self.groups if group.format]
        titles = dict.fromkeys(each.title for each in (*formats, *self.named.values()))
        return ", ".join(titles)


def all_but(method: str, format: Format, ignored: Sequence[Pattern] = ()) -> Quantization:
    """One format for all linear layers but those."""
    return Quantization(method, (FormatGroup((), format),), tuple(ignored))


def is_class(target: str) -> bool:
    """Whether a target is the class of all linear layers."""
    return target == _LINEAR
