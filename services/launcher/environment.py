"""A resolved configuration as environment variables: how the launcher's children are told.

Secrets and keys never stand in a command line, where every user of the machine can read them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from penstock.protocol.config import Config
from penstock.protocol.config.resolve import ENVIRONMENT_PREFIX, fields

LONGEST_BYTES = 131_072
"""Of ``NAME=value`` with the zero behind it: what Linux takes for a new process (``MAX_ARG_STRLEN``
in ``include/uapi/linux/binfmts.h``)."""
_LAUNCHERS_OWN = frozenset(
    {
        "frontends", "tokenizers", "data_parallel_size", "startup_timeout_s", "download",
        "model_dirs", "nodes", "join", "join_timeout_s", "executor", "resident", "keep_alive",
        "min_awake_s", "prefill_engines", "decode_engines",
    }
)  # fmt: skip
"""How many of what are started is nothing that a child should judge, and it gets a folder."""


def child_environment(config: Config, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of every child: what is inherited, without ``PENSTOCK_*``, plus each value
    of ``config`` that differs from its default.
    """
    environment = {
        name: value for name, value in inherited.items() if not name.startswith(ENVIRONMENT_PREFIX)
    }
    for field in fields().values():
        if field.name in _LAUNCHERS_OWN:
            continue
        value = getattr(getattr(config, field.group), field.name)
        if value != field.default and value is not None:
            environment[field.variable] = field.text(value)
    return environment


def without_long_values(environment: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """The variables that a process can be started with, and those of ``PENSTOCK_*`` that are too
    long for that as the text of a configuration file, for ``PENSTOCK_CONFIG``; empty: none is."""
    short, lines = dict[str, str](), list[str]()
    for name, value in environment.items():
        size = len(os.fsencode(name)) + len(os.fsencode(value)) + len("=\0")
        if size <= LONGEST_BYTES or not name.startswith(ENVIRONMENT_PREFIX):
            short[name] = value
            continue
        text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # as TOML has it
        lines.append(f"{name.removeprefix(ENVIRONMENT_PREFIX).lower()} = {text}\n")
    return short, "".join(lines)
