"""``penstock plan MODEL --gpus 8xh100``: which layouts over several GPUs fit, how fast each is."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec

from penstock.protocol.config import Config, ConfigError, Provenance
from penstock.protocol.config.complete import complete
from penstock.protocol.config.flags import FlagParser
from penstock.protocol.config.machine import Machine
from penstock.protocol.config.resolve import HIDDEN, MODEL, SECRET, fields
from penstock.protocol.config.shown import show
from penstock.protocol.config.spelled_numbers import spelled_number
from penstock.services.cli import with_named_model
from penstock.services.command_table import COMMANDS
from penstock.services.layout_choice import SIZES


def add_flags(parser: FlagParser) -> None:
    """``--help`` shows ``--gpus`` alone, ``--help-all`` what goes with it."""
    parser.add_argument(
        "--gpus",
        metavar="NxKIND",
        help="layouts over several: 8xh100, or auto (all here)",
    )
    group = parser.add_argument_group("layouts over several GPUs")

    def add(flag: str, text: str, **how: Any) -> None:
        action = group.add_argument(flag, help=argparse.SUPPRESS, **how)
        parser.whole_help[action.dest] = text

    number = {"type": _tokens, "metavar": "N"}
    add("--context", "tokens of a sequence on average [2048]", **number)
    add("--output-len", "those of them that are its answer [half]", **number)
    add(
        "--objective",
        "what stands first: most tokens a second, or the shortest answer to a lone request "
        "[throughput]",
        choices=("throughput", "latency"),
    )
    add("--json", "one JSON object", action="store_true")


def _tokens(text: str) -> int:
    with contextlib.suppress(ValueError, msgspec.ValidationError):
        if 1 <= (number := int(spelled_number(text))) < 2**31:
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens; give 1 or more, as in 4k")


def asked_for(parsed: argparse.Namespace) -> bool:
    """Whether layouts are wanted. Raises ``ConfigError`` for a flag that tells of them alone."""
    if parsed.gpus is not None:
        return True
    for name in ("context", "output_len", "objective", "json"):
        if getattr(parsed, name):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{flag} is about layouts over several GPUs: give --gpus, too, as in --gpus 8xh100"
            )
    return False


def run(
    config: Config, sources: Provenance, machine: Machine, parsed: argparse.Namespace
) -> tuple[str, int]:
    """What is printed, and the exit code. config: as resolved, of ``penstock serve``.

    Raises ``BadModelFolder`` and ``ConfigError``.
    """
    from penstock.services.worker.layouts.given_gpus import given_gpus
    from penstock.services.worker.layouts.report import LayoutRequest, report

    other = f"--gpu {parsed.gpu}" if parsed.gpu else "--device cpu"
    if parsed.gpu or config.device.device == "cpu":
        raise ConfigError(f"--gpus {parsed.gpus} and {other} name two devices")
    gpus = given_gpus(parsed.gpus)
    request = LayoutRequest(
        gpus=gpus,
        model=config.model.names()[0] if config.model.model else "penstock-demo",
        command=["penstock", "serve", *_given(config, sources)],
        context=parsed.context,
        output_len=parsed.output_len,
        objective=parsed.objective or "throughput",
        sizes=_given_sizes(config, sources),
        as_json=parsed.json,
    )
    weights = config.loading
    # Of a model on the hub, its settings suffice.
    bare = msgspec.structs.replace(weights, load_format="dummy")
    config = msgspec.structs.replace(config, loading=bare)
    config, sources = with_named_model(config, sources, only_look=False)
    config = msgspec.structs.replace(config, loading=weights)
    machine = msgspec.structs.replace(machine, gpus=gpus.count)
    config, sources = complete(config, sources, machine, may_lack_model=False)
    if parsed.show_config:
        return show(config, sources, COMMANDS["serve"].groups), 0
    return report(config, request)


def _given_sizes(config: Config, sources: Provenance) -> dict[str, int]:
    declared = fields()
    return {
        name: getattr(getattr(config, declared[name].group), name)
        for name in SIZES
        if sources[name].origin != "default"
    }


def _given(config: Config, sources: Provenance) -> Iterator[str]:
    """The model and the flags that were given, but for what a layout decides."""
    if config.model.model:
        yield config.model.model
    for name, field in fields(COMMANDS["serve"].groups).items():
        if sources[name].origin != "flag" or name in (MODEL, *SIZES):
            continue
        value = getattr(getattr(config, field.group), name)
        if field.is_bool:
            yield field.flag if value else f"--no-{field.flag.removeprefix('--')}"
            continue
        for one in value if field.is_list else [value]:
            yield from (field.flag, HIDDEN if name in SECRET else str(one))
