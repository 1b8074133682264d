"""The server of this user on this host that a command means."""

from __future__ import annotations

import os
from collections.abc import Mapping
from urllib.parse import urlsplit

from penstock.protocol.process.running_servers import (
    FOLDER_VARIABLE,
    RunningServer,
    running_servers,
)
from penstock.services.commands.endpoint import UNIX, Endpoint, socket_of
from penstock.services.commands.failure import UNREACHABLE, WRONG_USE, CommandError

_LOCAL = ("localhost", "127.0.0.1", "::1", "0.0.0.0", "::")


def server_here(named: str | None, environment: Mapping[str, str]) -> RunningServer | None:
    """The server that listens at the URL ``named``, or whose runtime folder it is; without a name
    the one whose folder ``FOLDER_VARIABLE`` names, else the only one. ``None``: there is none.
    Raises ``CommandError`` where there are several, and where none runs in that folder: another
    is not meant."""
    meant = environment.get(FOLDER_VARIABLE, "")
    if named and os.path.isdir(named):
        found = running_servers(environment, named)
    elif meant and not named:
        found = running_servers(environment, meant)
        if not found:
            raise CommandError(
                f"no server of yours runs in {meant}, which {FOLDER_VARIABLE} names; "
                "name the server's URL, or unset the variable",
                UNREACHABLE,
            )
    else:
        found = running_servers(environment)
        if named:
            found = [server for server in found if _is_at(server, named)]
    if len(found) > 1:
        raise CommandError(
            "several servers of yours run here; name one of "
            + ", ".join(server.record.url or server.folder for server in found),
            WRONG_USE,
        )
    return found[0] if found else None


def url_here(environment: Mapping[str, str]) -> str | None:
    """Where the server that ``server_here`` finds without a name listens; ``None``: there is none.
    Raises as that does, and where it does not listen yet: another may at the default address."""
    found = server_here(None, environment)
    if found is None:
        return None
    if not found.record.url:
        raise CommandError(
            f"your server in {found.folder} is still starting; `penstock status` shows how far it "
            "is, and the URL of another can be named",
            UNREACHABLE,
        )
    return found.record.url


def _is_at(server: RunningServer, url: str) -> bool:
    """Whether ``url`` is where it listens, with whatever name of this host."""
    if url.startswith(f"{UNIX}:") or server.record.url.startswith(f"{UNIX}:"):
        return Endpoint(UNIX, socket_of(url), 0).url == server.record.url
    try:
        asked, own = urlsplit(url if "://" in url else f"http://{url}"), urlsplit(server.record.url)
        same_port = (asked.port or 80) == own.port
    except ValueError:
        return False
    if own.hostname in _LOCAL:
        return same_port and (asked.hostname in _LOCAL or own.hostname in ("0.0.0.0", "::"))
    return same_port and asked.hostname == own.hostname
