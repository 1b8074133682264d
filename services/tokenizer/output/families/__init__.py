"""The wire families, by name. Each module here has a tuple ``FAMILIES``."""

from __future__ import annotations

import importlib
import pkgutil

from penstock.services.tokenizer.output.family import Family


def _read() -> dict[str, Family]:
    found: dict[str, Family] = {}
    for module in pkgutil.iter_modules(__path__):
        tables = importlib.import_module(f"{__name__}.{module.name}").FAMILIES
        found |= {family.name: family for family in tables}
    return found


FAMILIES: dict[str, Family] = _read()
