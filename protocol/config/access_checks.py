"""What cannot hold of names, keys and addresses by which clients reach a server."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from penstock.protocol.config.adapters import MAX_NAME
from penstock.protocol.config.api_keys import read_api_keys
from penstock.protocol.config.server_fields import ServerConfig
from penstock.protocol.config.sources import ConfigError
from penstock.protocol.keys.key_file import KeyFileError, read_keys
from penstock.protocol.shown_values import show
from penstock.protocol.wire.addresses import is_loopback

UNIX_PROXIES = "unix"
"""Among the trusted proxies: who connects to the UNIX socket."""
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+")
_ORIGIN = re.compile(r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")


def contradictions_of_names(names: Sequence[str]) -> Iterator[str]:
    """Of names for the served model."""
    if len(set(names)) < len(names):
        yield f"--served-model-name {' '.join(names)}: a name stands there twice"
    for name in names:
        if not name.strip() or not name.isprintable() or len(name) > MAX_NAME:
            yield (
                f"--served-model-name {show(name)}: 1 to {MAX_NAME} printable characters are "
                "allowed"
            )


def contradictions_of_access(server: ServerConfig) -> Iterator[str]:
    """Keys, and who reaches the server without one."""
    try:
        read_api_keys(server.api_key)
    except ConfigError as error:
        yield str(error)
    if server.keys_file:
        try:
            read_keys(Path(server.keys_file).expanduser())
        except KeyFileError as error:
            yield f"--keys-file {error}"
    if server.limits_url and not server.keys_file:
        yield (
            "--limits-url counts the limits of keys, which a --keys-file gives them; there is "
            "none, so nobody has a limit"
        )
    reached = server.published_host or server.host
    is_within = bool(server.uds and not server.published_host) or is_loopback(reached)
    port = server.host.partition(":")[2]
    if port.isdecimal():
        yield f"--host {server.host}: the port has a flag of its own, --port {port}"
    elif not (is_within or server.has_keys or server.insecure):
        yield (
            f"--{'published-' if server.published_host else ''}host {reached} is open to other "
            "hosts, but there is no --api-key and no --keys-file, so anybody could use the server; "
            "--insecure allows that"
        )


def contradictions_around(server: ServerConfig) -> Iterator[str]:
    """TLS, and the proxies and pages around the server."""
    if bool(server.tls_cert) != bool(server.tls_key):
        yield "--tls-cert and --tls-key go together: give both"
    for name in ("tls_cert", "tls_key"):
        path = getattr(server, name)
        if path and not os.access(os.path.expanduser(path), os.R_OK):
            yield f"--{name.replace('_', '-')} {path}: there is no such file that can be read"
    if server.root_path and not _ROOT_PATH.fullmatch(server.root_path):
        yield (
            f"--root-path {server.root_path}: expected a path as /llm, of letters, digits and "
            ". _ ~ -, without a slash at its end"
        )
    for proxy in server.trusted_proxies:
        if proxy == UNIX_PROXIES:
            if not server.uds:
                yield f"--trusted-proxies {proxy} has no meaning without --uds"
            continue
        try:
            ipaddress.ip_network(proxy, strict=False)
        except ValueError:
            yield f"--trusted-proxies {proxy}: expected an address or a network, as 10.0.0.0/8"
    for origin in server.allowed_origins:
        if not _ORIGIN.fullmatch(origin):
            yield f"--allowed-origins {origin}: expected http(s)://HOST[:PORT], and no wildcard"
