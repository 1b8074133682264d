"""Where a server would listen, the folder for sockets, and the folders of caches."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from penstock.protocol.config import ConfigError, resolve
from penstock.protocol.config.machine import triton_cache_folder
from penstock.protocol.config.server_fields import ServerConfig
from penstock.protocol.process.running_servers import PREFIX, running_servers, runtime_root
from penstock.protocol.wire.unix_listener import connected
from penstock.services.commands.doctor.finding import Finding, guarded, of_bytes

LEAST_FOR_MODELS = 1 << 30
"""Bytes: less is too little for the weights of most."""
LEAST_FOR_SMALL_FILES = 64 << 20
"""Bytes: a folder for temporary files or kernels that has less is about to be full."""
CONNECT_S = 1.0
LONGEST_SOCKET = len(f"{PREFIX}12345678/tokenizer-123456789012.sock")
"""Below the folder for sockets."""


def listeners(number: int | None, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Of each place where a server would listen by the environment, for HTTP and for gRPC if it is
    to serve that; by default where the settings cannot be read.

    number: the port of HTTP to look at in place of what is configured.
    """
    try:
        server = resolve(("server",), {}, environment)[0].server
    except ConfigError:
        server = ServerConfig()
    if server.uds and number is None:
        yield unix_socket(server.uds, "--uds", environment)
    else:
        yield port(server.host, server.port if number is None else number, environment)
    if server.grpc_uds:
        yield unix_socket(server.grpc_uds, "--grpc-uds", environment)
    elif server.grpc_port is not None:
        yield port(server.grpc_host or server.host, server.grpc_port, environment)


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


def unix_socket(given: str, flag: str, environment: Mapping[str, str]) -> Finding:
    """Whether a server could listen at a path now. What is there stays as it is."""
    name, path = "UNIX socket", Path(os.path.abspath(os.path.expanduser(given)))
    remedy = f"choose another path with {flag}"
    folder = path.parent
    if not os.path.isdir(folder):
        return Finding(name, f"{path}: {folder} is no folder", "problem", f"make it, or {remedy}")
    if not os.access(folder, os.W_OK | os.X_OK):
        return Finding(name, f"{path}: {folder} cannot be written to", "problem", remedy)
    if not os.path.lexists(path):
        return Finding(name, f"{path} is free")
    if not stat.S_ISSOCK(path.lstat().st_mode):
        return Finding(name, f"{path}: there is something else than a socket", "problem", remedy)
    if any(server.record.url == f"unix:{path}" for server in running_servers(environment)):
        return Finding(name, f"a server of yours listens at {path}")
    try:
        connected(str(path), CONNECT_S).close()
    except ConnectionRefusedError:
        return Finding(name, f"{path}: nobody listens on what is there, which gives way")
    except OSError as error:  # a queue that is full, or a socket of another user
        told = f"{path} seems to be in use: {error.strerror or error}"
        return Finding(name, told, "problem", remedy)
    return Finding(name, f"{path}: another process listens there", "problem", remedy)


def sockets(environment: Mapping[str, str], longest: int) -> Iterator[Finding]:
    """longest: bytes that the path of a socket may have."""
    remedy = "set XDG_RUNTIME_DIR or TMPDIR to a folder of yours on a disk with room"
    yield from guarded("sockets", lambda: [_sockets(runtime_root(environment), longest)], remedy)


def _sockets(root: Path, longest: int) -> Finding:
    if len(os.fsencode(root)) + 1 + LONGEST_SOCKET > longest:
        return Finding(
            "sockets", f"{root}: its path is too long for a socket's, {longest} bytes", "problem",
            "set XDG_RUNTIME_DIR or TMPDIR to a folder with a shorter path",
        )  # fmt: skip
    if not os.access(root, os.W_OK | os.X_OK):
        return Finding(
            "sockets", f"{root} cannot be written to", "problem",
            "set XDG_RUNTIME_DIR or TMPDIR to a folder of yours",
        )  # fmt: skip
    return Finding("sockets", str(root))


def folders(environment: Mapping[str, str], gpus: int) -> Iterator[Finding]:
    """Of temporary files, models and, for GPUs, compiled kernels."""
    small = LEAST_FOR_SMALL_FILES
    yield from _at("temporary files", lambda: Path(tempfile.gettempdir()), small, "TMPDIR")
    yield from _at("models", lambda: hub_cache(environment), LEAST_FOR_MODELS, "HF_HOME")
    if gpus:
        place = partial(triton_cache_folder, environment)
        yield from _at("compiled kernels", place, small, "TRITON_CACHE_DIR")


def _at(name: str, place: Callable[[], Path], least: int, variable: str) -> Iterator[Finding]:
    """place: may fail, as for a user without a home or where nothing can be written to."""
    remedy = f"set {variable} to a folder of yours on a disk with room"
    yield from guarded(name, lambda: [_folder(name, place(), least, variable)], remedy)


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
    # Of what is below a folder that may not be entered it says that it does not exist.
    while not os.path.exists(there) and there != there.parent:
        there = there.parent
    made = "" if there == folder else " (not there yet)"
    shown = f"{folder}{made}"
    if not os.path.isdir(there) or not os.access(there, os.W_OK | os.X_OK):
        return Finding(
            name, f"{shown} cannot be written to", "problem",
            f"set {variable} to a folder of yours, or correct its owner",
        )  # fmt: skip
    free = shutil.disk_usage(there).free
    told = f"{shown}, {of_bytes(free)} free"
    if free < least:
        return Finding(name, told, "warning", f"make room, or set {variable} to another disk")
    return Finding(name, told)
