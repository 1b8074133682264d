"""The private names of aiohttp that ``connection.py`` uses. A failure here says that this aiohttp
must not be allowed by ``pyproject.toml`` before ``connection.py`` fits it."""

from __future__ import annotations

import inspect
import re
import tomllib
from importlib.metadata import version
from pathlib import Path

from aiohttp import web, web_protocol, web_runner

ROOT = Path(__file__).resolve().parents[3]
SOURCE = (ROOT / "services" / "frontend" / "connection.py").read_text()


def test_this_aiohttp_has_the_private_names_that_connections_use() -> None:
    handler = set(web.RequestHandler.__slots__)
    assert {"_messages", "_waiter", "_current_request"} <= handler
    assert inspect.iscoroutinefunction(web_runner.BaseRunner._make_server)
    assert inspect.iscoroutinefunction(web.AppRunner._make_server)
    assert "exc" in web_protocol._ErrInfo.__annotations__
    for name in ("_messages", "_waiter", "_current_request", "_make_server", "_ErrInfo"):
        assert re.search(rf"\b{name}\b", SOURCE.partition('"""\n\n')[2]), f"{name} is used no more"


def test_only_minor_releases_that_were_tested_are_allowed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = [one for group in project["dependency-groups"].values() for one in group]
    for wanted in [
        one for one in (*project["project"]["dependencies"], *groups) if "aiohttp" in one
    ]:
        bound = re.search(r"<(\d+)\.(\d+)$", wanted)
        assert bound is not None, wanted
        major, minor = map(int, version("aiohttp").split(".")[:2])
        assert (major, minor) == (int(bound[1]), int(bound[2]) - 1), wanted
