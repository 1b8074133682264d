"""The processes behind the library: ``penstock serve`` without HTTP, as a child.

The child is started by exec, so scripts without a main guard and notebooks work. It ends when the
pipe to its standard input closes, however this process ends: on return, on an exception, or by
``kill -9``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import IO, Any

from penstock.protocol.config import ConfigError, resolve
from penstock.protocol.config.foreign import FOREIGN_SETTINGS
from penstock.protocol.config.resolve import fields
from penstock.protocol.model_hub import find_model, is_hub_name
from penstock.protocol.model_info import BadModelFolder

READY_WORD = "penstock-ready"
"""First word of the line that names the router's address and, behind a tab, the model's folder."""
GROUPS = (
    *("model", "cache", "scheduler", "speculation", "device", "loading"),
    *("cluster", "launch", "observability", "test"),
)
CLOSE_SECONDS = 10.0


class ServerFailed(RuntimeError):
    """The server could not start, or has ended. Carries what it said last."""


def _advice(name: str, known: Mapping[str, Any]) -> str:
    """What to do about a name that is no setting of the library."""
    if name in fields():
        return ": it is for clients over HTTP (`penstock serve`)"
    return FOREIGN_SETTINGS.advice(name, list(known))


def arguments_for(settings: Mapping[str, Any], caller: str = "LLM") -> list[str]:
    """Keyword arguments as the flags of ``penstock serve``. caller: the class that took them.

    Raises ``TypeError`` for a name that is no setting and ``ConfigError`` for a wrong value.
    """
    known = fields(GROUPS)
    unknown = [name for name in settings if name not in known]
    if unknown:
        told = "; ".join(name + _advice(name, known) for name in unknown)
        raise TypeError(f"{caller}() has no setting {told}")
    resolve(GROUPS, dict(settings), {})
    arguments = []
    for name, value in settings.items():
        if value is None:
            continue
        flag = known[name].flag
        if isinstance(value, bool):
            arguments.append(flag if value else "--no-" + flag.removeprefix("--"))
        elif isinstance(value, list | tuple):
            arguments += [f"{flag}={each}" for each in value]
        else:
            arguments.append(f"{flag}={value}")
    return arguments


def _with_folder(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings with the folder of a model that is named as on the hub. It is downloaded here,
    where its progress can be seen, not in the child. Raises ``ServerFailed``, ``ConfigError``."""
    given = {name: value for name, value in settings.items() if name in fields(GROUPS)}
    config, _ = resolve(GROUPS, given, os.environ)
    name = config.model.model
    if not is_hub_name(name):
        return settings
    try:
        folder = find_model(name, config)
    except BadModelFolder as error:
        raise ServerFailed(str(error)) from None
    named = {} if config.model.served_model_name else {"served_model_name": [name]}
    return {**settings, "model": str(folder), **named}


class ServerProcess:
    """A set of processes that starts at once."""

    def __init__(self, settings: Mapping[str, Any], caller: str = "LLM") -> None:
        """Downloads a model that is named as on the hub first. Raises ``ServerFailed``,
        ``ConfigError`` and ``TypeError``."""
        arguments_for(settings, caller)
        self.folder = ""
        """The model's, once it is ready."""
        arguments = arguments_for({"log_level": "warning", **_with_folder(settings)}, caller)
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115, closed in close()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "penstock.services", "serve", "--headless", "1", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            # Ctrl-C in a terminal or a notebook is for the user's code; the pipe ends the server.
            start_new_session=True,
        )

    def wait_ready(self) -> str:
        """The router's address, once all serve. Raises ``ServerFailed``, ``ConfigError``; soon
        after ``release``, too."""
        output = self.process.stdout
        if output is None:
            raise ServerFailed("the server's output cannot be read")
        for line in output:
            word, _, told = line.decode().rstrip("\n").partition(" ")
            if word == READY_WORD:
                router, _, self.folder = told.partition("\t")
                return router
        code = self.process.wait()
        said = self.last_words()
        if code == 2:
            raise ConfigError(said)
        raise ServerFailed(said or f"the server ended with code {code}")

    def last_words(self) -> str:
        """What the server wrote to its standard error, its newest lines."""
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - 4000))
        text = self._errors.read().decode(errors="replace").strip()
        return "\n".join(line.removeprefix("penstock: ") for line in text.splitlines()[-20:])

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def release(self) -> None:
        """Let all processes end, without waiting for that. Idempotent, from any thread."""
        if self.process.stdin is not None:
            self.process.stdin.close()

    def close(self) -> None:
        """End all processes; returns when they are gone."""
        self.release()
        try:
            self.process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._errors.close()
