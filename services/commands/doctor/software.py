"""Versions, and the settings that the environment holds."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import penstock
from penstock.protocol.config import ConfigError, resolve
from penstock.services.command_table import COMMANDS
from penstock.services.commands.doctor.finding import Finding

PACKAGES = (
    "torch", "triton", "transformers", "tokenizers", "huggingface-hub", "safetensors", "numpy",
    "aiohttp", "uvloop", "pyzmq", "msgspec", "llguidance", "jinja2", "psutil", "structlog",
    "pyyaml", "setproctitle",
)  # fmt: skip
OPTIONAL = {"triton", "safetensors"}
EXTRAS = {"grpcio": "grpc", "opentelemetry-sdk": "otel", "valkey": "valkey", "ray": "ray"}
"""Packages that only some settings need, and the extra that brings them."""
SHOWN = ("CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "LD_PRELOAD")
"""Variables of others whose values matter here and are no secrets."""


def software() -> Iterator[Finding]:
    place = Path(penstock.__file__).resolve().parent
    yield Finding("penstock", f"{penstock.__version__} in {place}")
    yield Finding("python", f"{platform.python_version()}, {sys.executable}")
    yield Finding("system", f"{platform.platform()}, {_distribution()}".rstrip(", "))
    wanted = _wanted()
    for name in PACKAGES:
        found = version(name)
        if found is None:
            if name not in OPTIONAL:
                yield Finding(
                    name, "not installed", "problem",
                    "pip install penstock installs what all processes need",
                )  # fmt: skip
            continue
        if unfit := wanted.get(name):
            yield Finding(
                name, f"{found}; {unfit} is needed", "problem", f"pip install '{name}{unfit}'"
            )
        else:
            yield Finding(name, found)
    extras = [f"{name} {found}" for name in EXTRAS if (found := version(name))]
    yield Finding("extras", ", ".join(extras) or "none")


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _wanted() -> dict[str, str]:
    """What penstock's own metadata asks for of packages whose installed version does not do; empty
    where it was not installed by pip."""
    try:
        from packaging.requirements import Requirement

        asked = [Requirement(text) for text in importlib.metadata.requires("penstock") or ()]
    except (ImportError, ValueError, importlib.metadata.PackageNotFoundError):
        return {}
    unfit = {}
    for one in asked:
        if one.marker is not None and not one.marker.evaluate({"extra": ""}):
            continue
        found = version(one.name)
        if found is not None and not one.specifier.contains(found, prereleases=True):
            unfit[one.name] = str(one.specifier)
    return unfit


def _distribution() -> str:
    """The name of the Linux distribution."""
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        return ""


def settings(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Names alone of what may be a secret."""
    names = sorted(name for name in environment if name.startswith("PENSTOCK_"))
    yield Finding("settings", ", ".join(names) or "none in the environment")
    try:
        resolve(COMMANDS["serve"].groups, {}, environment, several=True)
    except ConfigError as error:
        for line in str(error).splitlines():
            yield Finding("settings", line, "problem", "correct it, or take it out")
    for name in SHOWN:
        if name in environment:
            yield Finding(name, environment[name])
    proxies = sorted(name for name in environment if name.lower().endswith("_proxy"))
    if proxies:
        yield Finding("proxies", ", ".join(proxies))
