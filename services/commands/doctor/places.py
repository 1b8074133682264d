"""The port, the folder for sockets, and the folders of caches."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from penstock.protocol.config.machine import triton_cache_folder
from penstock.protocol.process.running_servers import PREFIX, running_servers, runtime_root
from penstock.services.commands.doctor.finding import Finding, of_bytes
from penstock.services.commands.doctor.software import in_home

LITTLE_SPACE = 1 << 30
FEW_SPACE = 64 << 20
"""A folder for temporary files that has less is about to be full."""
LONGEST_SOCKET = len(f"{PREFIX}12345678/tokenizer-123456789012.sock")
"""Below the folder for sockets."""


def port(host: str, number: int, environment: Mapping[str, str]) -> Finding:
    """Whether a server could listen there now."""
    name, where = f"port {number}", f"{host}:{number}"
    for server in running_servers(environment):
        try:
            used = urlsplit(server.record.url).port
        except ValueError:
            continue
        if number and used == number:
            return Finding(name, f"a server of yours listens at {server.record.url}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, number))
            probe.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            remedy = "stop what listens there (ss -ltnp shows it), or choose another --port"
        elif error.errno == errno.EACCES:
            remedy = "ports below 1024 are for root; choose another --port"
        else:
            remedy = "choose an address of this host with --host"
        return Finding(name, f"{where}: {error.strerror or error}", "problem", remedy)
    return Finding(name, f"{where} is free")


def sockets(environment: Mapping[str, str], longest: int) -> Finding:
    """longest: bytes that the path of a socket may have."""
    root = runtime_root(environment)
    told = in_home(root)
    if len(os.fsencode(root)) + 1 + LONGEST_SOCKET > longest:
        return Finding(
            "sockets", f"{told}: its path is too long for a socket's, {longest} bytes", "problem",
            "set XDG_RUNTIME_DIR or TMPDIR to a folder with a shorter path",
        )  # fmt: skip
    if not os.access(root, os.W_OK | os.X_OK):
        return Finding(
            "sockets", f"{told} cannot be written to", "problem",
            "set XDG_RUNTIME_DIR or TMPDIR to a folder of yours",
        )  # fmt: skip
    return Finding("sockets", told)


def folders(environment: Mapping[str, str], gpus: int) -> Iterator[Finding]:
    yield _folder("temporary files", Path(tempfile.gettempdir()), FEW_SPACE, "TMPDIR")
    yield _folder("models", hub_cache(environment), LITTLE_SPACE, "HF_HOME")
    if gpus:
        place = triton_cache_folder(environment)
        yield _folder("compiled kernels", place, FEW_SPACE, "TRITON_CACHE_DIR")


def hub_cache(environment: Mapping[str, str]) -> Path:
    """Where the Hugging Face hub's tools keep models, as they read ``environment``."""
    if named := environment.get("HF_HUB_CACHE"):
        return Path(named).expanduser()
    if home := environment.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    cache = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "huggingface" / "hub"


def _folder(name: str, folder: Path, least: int, variable: str) -> Finding:
    """Of a folder that is written to, or will be made; least: bytes that should be free."""
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    made = "" if there == folder else " (not there yet)"
    shown = f"{in_home(folder)}{made}"
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Finding(
            name, f"{shown} cannot be written to", "problem",
            f"set {variable} to a folder of yours, or correct its owner",
        )  # fmt: skip
    free = shutil.disk_usage(there).free
    told = f"{shown}, {of_bytes(free)} free"
    if free < least:
        return Finding(name, told, "warning", f"make room, or set {variable} to another disk")
    return Finding(name, told)
