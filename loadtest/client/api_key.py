"""Which key a measurement sends: none that is meant for another server."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.loadtest.client.target import TargetError
from penstock.services.commands.endpoint import URL_VARIABLE, endpoint
from penstock.services.commands.failure import CommandError

KEY_HELP = "(default: PENSTOCK_API_KEY; OPENAI_API_KEY where OPENAI_BASE_URL is that server)"


def key_for(url: str, given: str | None, environment: Mapping[str, str]) -> str:
    """The key for the server at ``url``, empty where there is none: the flag's, else the
    environment's as for ``penstock chat``. Raises ``TargetError``."""
    try:
        found = endpoint(url, given, environment)
        if given or not environment.get(URL_VARIABLE):
            return found.key
        named = endpoint(None, None, environment)
    except CommandError as error:
        raise TargetError(str(error)) from None
    return named.key if named.url == found.url else found.key
