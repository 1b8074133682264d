"""The library as the subject of a measurement: its flags, its model, how it is started."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from penstock.loadtest.environment import date, environment
from penstock.loadtest.progress import CLEAR
from penstock.loadtest.reports import report
from penstock.loadtest.roofline.device_limits import LimitsFailed
from penstock.protocol.config import Config
from penstock.protocol.config.derive import derive
from penstock.protocol.config.flags import build_parser
from penstock.protocol.config.machine import read_machine
from penstock.protocol.config.resolve import fields, resolve
from penstock.protocol.config.shown import show
from penstock.protocol.model_info import ModelInfo, read_model_info
from penstock.services.launcher.builtin_model import builtin_model
from penstock.services.launcher.named_model import with_hub_model
from penstock.services.library.outputs import RequestError
from penstock.services.library.server_process import GROUPS, ServerFailed

FAILED, WRONG_SETTINGS, INTERRUPTED = 1, 2, 130
_ORIGINS = ("flag", "file")
"""What comes from the environment, the library's own processes read for themselves."""


class Engine(msgspec.Struct, frozen=True):
    """What ``LLM(**settings)`` is to be called with, and the model behind it."""

    settings: dict[str, Any]
    info: ModelInfo
    config: Config
    """Everything resolved, with what follows from the model and the machine."""

    @property
    def seed(self) -> int:
        return self.config.model.seed


def parser_for(command: str, description: str) -> argparse.ArgumentParser:
    """A parser with every setting of the library; ``MODEL`` may come first."""
    parser = build_parser(f"penstock bench {command}", description, GROUPS, positional_model=True)
    add_result_flags(parser)
    return parser


def add_result_flags(parser: argparse.ArgumentParser) -> None:
    """What ``guarded`` reads."""
    group = parser.add_argument_group("results")
    group.add_argument("--output-json", metavar="FILE", help="write the figures there")
    group.add_argument("--quiet", action="store_true", help="no progress on the terminal")


def engine_of(parsed: argparse.Namespace) -> Engine:
    """Raises ``ConfigError`` and ``BadModelFolder``; ``SystemExit`` after ``--show-config``."""
    config, sources = resolve(GROUPS, parsed, os.environ)
    settings = {
        name: getattr(getattr(config, field.group), name)
        for name, field in fields(GROUPS).items()
        if sources[name].origin in _ORIGINS
    }
    if parsed.show_config:
        print(show(config, sources, GROUPS))
        raise SystemExit(0)
    if config.model.model:
        config, sources = with_hub_model(config, sources)
    info = read_model_info(config.model.model or builtin_model())
    config, _ = derive(config, sources, read_machine(), info)
    return Engine(settings, info, config)


def guarded(
    measure: Callable[[], dict[str, Any]],
    table: Callable[[dict[str, Any]], str],
    parsed: argparse.Namespace,
) -> int:
    """Measure, print, save; errors of the library become one line. Returns the exit code."""
    path = Path(parsed.output_json) if parsed.output_json else None
    try:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("ab").close()
        result = measure()
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        print(f"penstock: {error.filename}: {error.strerror}", file=sys.stderr)
        return WRONG_SETTINGS
    except (ServerFailed, RequestError, LimitsFailed) as error:
        print(f"penstock: {error}", file=sys.stderr)
        return FAILED
    if sys.stderr.isatty():
        print(CLEAR, end="", file=sys.stderr)
    print(table(result))
    if path is not None:
        report.save(result, path)
        print(f"\nsaved in {path}")
    return 0


def described(command: str, arguments: Sequence[str], engine: Engine) -> dict[str, Any]:
    """The first members of a result: what was measured, where and how."""
    return {
        **recorded(command, arguments),
        "model": str(engine.info.folder),
        "settings": {n: value for n, value in engine.settings.items() if n != "secret"},
    }


def recorded(command: str, arguments: Sequence[str]) -> dict[str, Any]:
    """When and where a measurement was made."""
    known = environment(f"penstock bench {command}", arguments)
    known["torch"] = metadata.version("torch")
    return {"date": date(), "environment": known}


def check_length(engine: Engine, longest: int) -> None:
    """Raises ``ValueError`` if a prompt and its answer are longer than the model allows."""
    limit = engine.settings.get("max_model_len") or engine.info.max_model_len
    if longest > limit:
        raise ValueError(
            f"a prompt and its answer of together {longest} tokens are more than the {limit} of "
            "the model; lower --input-len or --output-len, or raise --max-model-len"
        )
