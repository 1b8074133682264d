"""What an image of one role has installed, and a Python that has nothing else.

The images cannot be built here, so a process runs in the tests' own environment with a finder
that hides every package outside the role's dependency group and what that group requires.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[3]
SITE = """
import importlib.machinery, json, os, sys

with open(os.environ["HIDDEN_MODULES"]) as file:
    HIDDEN = frozenset(json.load(file))

class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            return None
        return super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Finder
"""


def groups() -> dict[str, list[Any]]:
    with open(ROOT / "pyproject.toml", "rb") as file:
        found: dict[str, list[Any]] = tomllib.load(file)["dependency-groups"]
    return found


def requirements(group: str) -> list[str]:
    """The lines of a group and of those that it includes."""
    found = []
    for entry in groups()[group]:
        found += [entry] if isinstance(entry, str) else requirements(entry["include-group"])
    return found


def distributions(group: str) -> set[str]:
    """What pip installs for a group: its lines and, as far as they are here, what they require."""
    found: set[str] = set()
    waiting = [Requirement(text) for text in requirements(group)]
    seen: set[str] = set()
    while waiting:
        requirement = waiting.pop()
        if str(requirement) in seen:
            continue
        seen.add(str(requirement))
        name = canonicalize_name(requirement.name)
        found.add(name)
        try:
            lines = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for line in map(Requirement, lines):
            extras = requirement.extras or {""}
            if line.marker is None or any(line.marker.evaluate({"extra": e}) for e in extras):
                waiting.append(line)
    return found


@functools.cache
def module_owners() -> Mapping[str, list[str]]:
    """The distributions of each top-level module: those of everything installed here are read."""
    return importlib.metadata.packages_distributions()


@functools.cache
def hidden_modules(group: str) -> list[str]:
    """Top-level modules of everything installed here that the group does not bring."""
    installed = distributions(group) | {"penstock"}
    return sorted(
        module
        for module, owners in module_owners().items()
        if not {canonicalize_name(owner) for owner in owners} & installed
    )


def environment(group: str, folder: Path) -> dict[str, str]:
    """Variables under which Python finds only what an image of the group holds."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(SITE)
    modules = folder / f"{group}.json"
    modules.write_text(json.dumps(hidden_modules(group)))
    return {"PYTHONPATH": str(folder), "HIDDEN_MODULES": str(modules)}
