"""Defaults < file < environment < flags, resolved once into a frozen ``Config``.

Every value remembers where it came from (``Provenance``), so that ``--show-config`` can say it.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from penstock.protocol.config.checks import contradictions
from penstock.protocol.config.fields import Config
from penstock.protocol.config.foreign import FOREIGN_SETTINGS
from penstock.protocol.config.models import models_in, several_refused, written
from penstock.protocol.config.sources import ConfigError, Provenance, Source
from penstock.protocol.config.spelled_numbers import FORMS, spelled_number
from penstock.protocol.plain_errors import plain_error
from penstock.protocol.shown_values import show

ENVIRONMENT_PREFIX = "PENSTOCK_"
SECRET = frozenset({"secret", "api_key"})
HIDDEN = "<hidden>"
"""What ``--show-config`` writes in place of a secret."""
MODEL = "model"
"""The one setting that may name several things: see ``ModelConfig.models``."""


def flag_of(name: str) -> str:
    """The flag of a field, whether there is one of that name or not."""
    return "--" + name.replace("_", "-")


def _variable_of(name: str) -> str:
    return ENVIRONMENT_PREFIX + name.upper()


class Field(msgspec.Struct, frozen=True):
    """One declared field, as flags, environment and files see it."""

    group: str
    name: str
    type: Any
    default: Any
    help: str

    @property
    def flag(self) -> str:
        return flag_of(self.name)

    @property
    def variable(self) -> str:
        return _variable_of(self.name)

    @property
    def is_list(self) -> bool:
        return get_origin(_bare(self.type)) is list

    @property
    def is_bool(self) -> bool:
        return _bare(self.type) is bool

    @property
    def is_whole(self) -> bool:
        """A whole number, which may be left out."""
        bare = _bare(self.type)
        return int in (bare, *map(_bare, get_args(bare))) and get_origin(bare) is not Literal

    @property
    def choices(self) -> tuple[Any, ...]:
        """All that it may be, where that can be listed."""
        bare = _bare(self.type)
        return get_args(bare) if get_origin(bare) is Literal else ()

    def convert(self, value: Any) -> Any:
        """Text (or a file's value) into the declared type.

        Raises ``msgspec.ValidationError`` with the bound that was missed, or the choices.
        """
        if self.is_list and isinstance(value, str):
            value = list_of(value)
        choices = self.choices
        if isinstance(value, str) and choices:
            if any(isinstance(choice, int) for choice in choices) and value.isdecimal():
                value = int(value)
            if value not in choices:
                known = ", ".join(map(str, choices))
                raise msgspec.ValidationError(f"Expected one of {known}")
        if isinstance(value, str) and self.is_whole:
            value = spelled_number(value)
        try:
            return msgspec.convert(value, self.type, strict=False)
        except msgspec.ValidationError as error:
            misspelled = isinstance(value, str) and not value.removeprefix("-").isdecimal()
            if misspelled and str(error).startswith("Expected `int"):
                raise msgspec.ValidationError(f"{plain_error(error)}, {FORMS}") from None
            raise

    def text(self, value: Any) -> str:
        """The value as an environment variable holds it; ``convert`` reads it back."""
        if self.name == MODEL:
            return written(value)
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, list):
            parts = [str(part) for part in value]
            joined = ",".join(parts)
            return joined if _parts_or_none(joined) == parts else json.dumps(parts)
        return str(value)


def list_of(text: str) -> list[str]:
    """A list in one text: separated by commas, or a JSON array where a value holds a comma.

    Raises ``msgspec.ValidationError``.
    """
    if not text.startswith("["):
        return [part for part in text.split(",") if part]
    try:
        return msgspec.json.decode(text, type=list[str])
    except msgspec.DecodeError:
        raise msgspec.ValidationError(
            "Expected values separated by commas, or a JSON array of strings"
        ) from None


def _parts_or_none(text: str) -> list[str] | None:
    try:
        return list_of(text)
    except msgspec.ValidationError:
        return None


def _bare(hint: Any) -> Any:
    while hasattr(hint, "__metadata__"):
        hint = hint.__origin__
    return hint


def _help(hint: Any) -> str:
    for meta in getattr(hint, "__metadata__", ()):
        if isinstance(meta, msgspec.Meta) and meta.description:
            return meta.description
    return ""


def fields(groups: Sequence[str] | None = None) -> dict[str, Field]:
    """Fields of the named groups (all by default), by name; names are unique over groups."""
    declared = _declared()
    if groups is None:
        return dict(declared)
    return {name: field for name, field in declared.items() if field.group in groups}


@cache
def _declared() -> dict[str, Field]:
    """Read once in a process: each annotation is a text that Python compiles when it is asked."""
    found: dict[str, Field] = {}
    for group, kind in get_type_hints(Config).items():
        hints = get_type_hints(kind, include_extras=True)
        for info in msgspec.structs.fields(kind):
            if info.name == "models":
                continue
            default = info.default
            if default is msgspec.NODEFAULT:
                default = info.default_factory()
            hint = hints[info.name]
            found[info.name] = Field(group, info.name, hint, default, _help(hint))
    return found


def read_file(path: str) -> dict[str, Any]:
    """Read a TOML or YAML file; groups may be tables or left out. Raises ``ConfigError``."""
    try:
        data = Path(path).read_bytes()
        if path.endswith((".yaml", ".yml")):
            tree = msgspec.yaml.decode(data)
        else:
            tree = msgspec.toml.decode(data)
    except (OSError, ImportError, UnicodeDecodeError, msgspec.DecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--config {path}: {reason}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"--config {path}: expected keys and values, got {show(tree)}")
    groups = set(get_type_hints(Config))
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        is_group = key in groups and isinstance(value, dict)
        for name, single in value.items() if is_group else ((key, value),):
            name = str(name).replace("-", "_")
            if name in flat:
                raise ConfigError(f"--config {path}: {name} is given twice")
            flat[name] = single
    return flat


class _Gathering:
    """Values of declared fields from one source after another; a later one wins."""

    def __init__(self, groups: Sequence[str]) -> None:
        self.declared = fields(groups)
        self.everything = fields()
        self.values: dict[str, Any] = {}
        self.sources: Provenance = {}
        self.faults: list[str] = []
        self.unread: set[str] = set()
        """Flags of the fields whose value is a fault."""
        self.models: list[str] = []
        """Where ``model`` names several."""

    def _take(self, field: Field, raw: Any, source: Source, label: str) -> None:
        try:
            if field.name == MODEL:
                models = models_in(raw, separated=source.origin == "environment")
                self.models = models if len(models) > 1 else []
                raw = models[0] if len(models) == 1 else ""
            self.values[field.name] = field.convert(raw)
            self.sources[field.name] = source
        except msgspec.ValidationError as error:
            shown = HIDDEN if field.name in SECRET else repr(raw)
            self.faults.append(f"{label} {shown}: {plain_error(error)}")
            self.unread.add(field.flag)

    def file(self, path: str) -> None:
        """Raises ``ConfigError`` for a file that cannot be read."""
        for key, raw in read_file(path).items():
            if key not in self.everything:
                known = [*self.everything, *get_type_hints(Config)]
                advice = FOREIGN_SETTINGS.advice(key, known)
                self.faults.append(f"--config {path}: unknown key {key!r}{advice}")
            elif key in self.declared:
                self._take(self.declared[key], raw, Source("file", path), f"--config {path}: {key}")

    def environment(self, environment: Mapping[str, str]) -> None:
        for variable, text in environment.items():
            if not variable.startswith(ENVIRONMENT_PREFIX):
                continue
            name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
            if name == "config":
                continue
            if name not in self.everything:
                advice = FOREIGN_SETTINGS.advice(name, self.everything, _variable_of)
                self.faults.append(f"unknown environment variable {variable}{advice}")
            elif name in self.declared:
                self._take(self.declared[name], text, Source("environment", variable), variable)

    def flags(self, given: Mapping[str, Any]) -> None:
        """``MODEL`` is the same as ``model``."""
        named = given.get("MODEL")
        if "" in (named if isinstance(named, list) else [named]):  # a variable that is not set
            self.faults.append("MODEL is empty; leave it out for the built-in model")
        if positional := _plain(given.get("MODEL")):
            flag = _plain(given.get(MODEL))
            if flag not in (None, positional):
                self.faults.append(f"MODEL is {positional!r}, but --model is {flag!r}")
            given = {**given, MODEL: positional}
        for name, field in self.declared.items():
            raw = given.get(name)
            if raw is not None:
                self._take(field, raw, Source("flag", field.flag), field.flag)

    def refuse_hidden(self) -> None:
        """A secret that was left out where these settings were shown, and that nothing replaces."""
        for name, value in self.values.items():
            if HIDDEN not in (value if isinstance(value, list) else [value]):
                continue
            field, source = self.declared[name], self.sources[name]
            place = (
                f"--config {source.detail}: {name}" if source.origin == "file" else source.detail
            )
            written = ', or "file:PATH" of a file that holds it' if name in SECRET else ""
            self.faults.append(
                f"{place} is {HIDDEN!r}, which stands where a secret was not shown: write the "
                f"secret there{written}; or give it by {field.variable} or {field.flag}, which win"
            )
            self.unread.add(field.flag)

    def config(self) -> Config:
        """The whole of it, with defaults for what nobody gave."""
        tree: dict[str, dict[str, Any]] = {}
        for name, field in self.everything.items():
            default = field.default
            default = [*default] if isinstance(default, list) else default
            tree.setdefault(field.group, {})[name] = self.values.get(name, default)
            self.sources.setdefault(name, Source("default"))
        tree["model"]["models"] = self.models
        hints = get_type_hints(Config)
        return Config(**{group: hints[group](**kwargs) for group, kwargs in tree.items()})


def _plain(models: Any) -> Any:
    """A list of one model is that model; an empty one is none."""
    if isinstance(models, list) and len(models) < 2:
        return models[0] if models else None
    return models


def resolve(
    groups: Sequence[str],
    arguments: argparse.Namespace | Mapping[str, Any],
    environment: Mapping[str, str],
    *,
    several: bool = False,
) -> tuple[Config, Provenance]:
    """One frozen ``Config`` from all sources. Raises ``ConfigError`` that lists every fault.

    ``several``: ``model`` may name more than one.
    Environment variables of groups that this command does not read are left alone (one
    environment serves all processes); unknown ``PENSTOCK_*`` names are an error.
    """
    given = dict(arguments) if isinstance(arguments, Mapping) else vars(arguments)
    gathering = _Gathering(groups)
    if path := given.get("config") or environment.get(ENVIRONMENT_PREFIX + "CONFIG"):
        gathering.file(str(path))
    gathering.environment(environment)
    gathering.flags(given)
    gathering.refuse_hidden()
    config = gathering.config()
    if config.model.models and not several:
        where = gathering.sources[MODEL].detail
        gathering.faults.append(several_refused(config.model.models, where))
    conflicts = [
        line
        for line in contradictions(config, gathering.sources)
        # A setting that could not be read stands at its default, which contradicts nobody.
        if not any(re.search(rf"{flag}(?![\w-])", line) for flag in gathering.unread)
    ]
    if faults := gathering.faults + conflicts:
        raise ConfigError("\n".join(faults))
    return config, gathering.sources
