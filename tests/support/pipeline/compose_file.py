"""docker-compose.yml and the Dockerfile, read as Docker would, as far as the tests need it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
SECRETS = "/run/secrets"
"""Where the volume with the shared secret is mounted."""
_VARIABLE = re.compile(
    r"\$(?:(?P<escaped>\$)|(?P<plain>\w+)|"
    r"\{(?P<name>\w+)(?:(?P<operator>:?[-+?])(?P<argument>[^{}]*))?\})"
)


class MissingVariable(ValueError):
    """``${NAME:?text}`` and there is none."""


def interpolate(text: str, variables: Mapping[str, str]) -> str:
    """Compose's ``$NAME``, ``${NAME}`` with ``-``, ``+`` and ``?`` (``:`` counts an empty one as
    unset), and ``$$``."""

    def value(match: re.Match[str]) -> str:
        if match["escaped"]:
            return "$"
        found = variables.get(match["name"] or match["plain"])
        operator, argument = match["operator"] or "", match["argument"] or ""
        is_set = found is not None and (found != "" or ":" not in operator)
        if operator.endswith("-"):
            return found if is_set and found is not None else argument
        if operator.endswith("+"):
            return argument if is_set else ""
        if operator.endswith("?") and not is_set:
            raise MissingVariable(argument)
        return found or ""

    return _VARIABLE.sub(value, text)


@dataclass
class Mount:
    """A volume of a service: a name or a path of the host, and where it appears."""

    source: str
    target: str
    read_only: bool


@dataclass
class Service:
    """One service with everything filled in."""

    name: str
    command: list[str]
    environment: dict[str, str]
    networks: list[str]
    mounts: list[Mount]
    ports: list[str]
    profiles: list[str]
    depends_on: dict[str, Any]
    target: str
    """The Dockerfile's target; empty when the image is a foreign one."""
    raw: dict[str, Any] = field(repr=False)


def read_compose(variables: Mapping[str, str]) -> dict[str, Service]:
    """The services of docker-compose.yml under a shell with these variables."""
    tree = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return {name: _service(name, raw, variables) for name, raw in tree["services"].items()}


def _service(name: str, raw: dict[str, Any], variables: Mapping[str, str]) -> Service:
    filled = _fill(raw, variables)
    environment = {
        key: variables[key] if value is None else str(value)
        for key, value in filled.get("environment", {}).items()
        if value is not None or key in variables
    }
    return Service(
        name,
        filled.get("command", []),
        environment,
        filled.get("networks", []),
        [_mount(text) for text in filled.get("volumes", [])],
        filled.get("ports", []),
        filled.get("profiles", []),
        filled.get("depends_on", {}),
        filled.get("build", {}).get("target", ""),
        filled,
    )


def _fill(node: Any, variables: Mapping[str, str]) -> Any:
    if isinstance(node, str):
        return interpolate(node, variables)
    if isinstance(node, list):
        return [_fill(child, variables) for child in node]
    if isinstance(node, dict):
        return {key: _fill(child, variables) for key, child in node.items()}
    return node


def _mount(text: str) -> Mount:
    source, target, *options = text.split(":")
    return Mount(source, target, "ro" in options)


def stop_order(services: Mapping[str, Service]) -> list[str]:
    """Dependents before what they depend on, as `docker compose down` stops them."""
    order: list[str] = []

    def visit(name: str) -> None:
        if name in order or name not in services:
            return
        for dependency in services[name].depends_on:
            visit(dependency)
        order.append(name)

    for name in services:
        visit(name)
    return order[::-1]


@dataclass
class Stage:
    """One ``FROM`` of the Dockerfile with its instructions, lines joined."""

    name: str
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, keyword: str) -> list[str]:
        return [text for word, text in self.instructions if word == keyword]


def read_dockerfile() -> dict[str, Stage]:
    text = (ROOT / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for line in filter(None, map(str.strip, joined.splitlines())):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            stage = stages[name] = Stage(name, base)
        elif stage is not None:
            stage.instructions.append((word, rest.strip()))
    return stages


@dataclass
class Copy:
    """One COPY: from the build context, unless ``stage`` is named."""

    sources: list[str]
    stage: str


def copies(stage: Stage) -> list[Copy]:
    found = []
    for text in stage.all("COPY"):
        words = shlex.split(text)
        origin = [w.removeprefix("--from=") for w in words if w.startswith("--from=")]
        paths = [w for w in words if not w.startswith("--")]
        found.append(Copy(paths[:-1], origin[0] if origin else ""))
    return found


def dependency_group(stages: Mapping[str, Stage], target: str) -> str:
    """The group of pyproject.toml that a target's packages are installed from."""
    for copy in copies(stages[target]):
        if copy.stage.endswith("-packages"):
            runs = " ".join(stages[copy.stage].all("RUN"))
            (group,) = re.findall(r"install --group (\S+)", runs)
            return str(group)
    raise AssertionError(f"{target} copies no packages")


def in_build_context(path: str) -> bool:
    """Whether .dockerignore lets ``path`` (a file or folder of the root) through."""
    included = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line.strip().lstrip("!") in {"*", path}:
            included = line.startswith("!")
    return included and os.path.lexists(ROOT / path)


def make_secret(service: Service, folder: Path) -> None:
    """Run the command of the one-shot service on a folder in the volume's place."""
    folder.mkdir(mode=0o700, exist_ok=True)
    command = [part.replace(SECRETS, str(folder)) for part in service.command]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(command, check=True, env={"PATH": path}, timeout=60)
