"""The flags of ``penstock doctor``, and its report.

Exit codes: 0, 1 something would keep a server from working, 2 wrong flags, 130 interrupted.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import msgspec

from penstock.services.commands.doctor.finding import (
    Finding,
    Section,
    as_text,
    count,
    guarded,
    verdict,
    without_home,
)
from penstock.services.commands.parser import CommandParser
from penstock.services.commands.printable import printable

SMOKE_TESTS = ("cpu", "null", "none")


def parser() -> CommandParser:
    parser = CommandParser(
        "doctor",
        "[flags]",
        "Look at what a server needs of this machine, start one with the built-in model, and say "
        "what would keep one from working. What it prints is meant for an issue: read it before, "
        "as it shows settings that are wrong and the server's own words.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument(
        "--smoke-test", choices=SMOKE_TESTS, default="cpu",
        help="the device of that server: null computes nothing and needs no torch, none starts "
        "no server (default: cpu)",
    )  # fmt: skip
    parser.add_argument(
        "--port", type=_port, metavar="N", help="to look at (default: PENSTOCK_PORT, else 8000)"
    )
    return parser


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"expected a number up to 65535, got {text!r}")
    return int(text)


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Returns the exit code."""
    parsed = parser().parse_args(arguments)
    sections = without_home(list(_sections(parsed, environment)))
    if parsed.json:
        found = {
            "ok": count(sections, "problem") == 0,
            "problems": count(sections, "problem"),
            "warnings": count(sections, "warning"),
            "sections": sections,
        }
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        # A variable, a name of the system or the server's words may hold anything.
        print(printable(f"{as_text(sections)}{verdict(sections)}"))
    return 1 if count(sections, "problem") else 0


def _sections(parsed: argparse.Namespace, environment: Mapping[str, str]) -> Iterator[Section]:
    from penstock.protocol.config.machine import read_machine
    from penstock.protocol.config.terminal import style_of
    from penstock.protocol.wire.mailbox import MAX_IPC_PATH
    from penstock.services.commands.doctor import hardware, limits, places, software
    from penstock.services.commands.doctor.smoke import smoke_test

    machine = read_machine(environment=environment)
    yield _section(
        "Software",
        ("software", software.software),
        ("settings", lambda: software.settings(environment)),
    )
    yield _section(
        "Machine",
        ("processor", lambda: hardware.processor(machine)),
        ("torch", lambda: hardware.torch_and_gpus(machine, environment)),
    )
    yield _section("Limits", ("limits", lambda: limits.limits(machine.gpus)))
    yield _section(
        "Places",
        ("port", lambda: places.listeners(parsed.port, environment)),
        ("sockets", lambda: places.sockets(environment, MAX_IPC_PATH)),
        ("folders", lambda: places.folders(environment, machine.gpus)),
    )
    if parsed.smoke_test != "none":
        style = style_of(2, environment)
        test = partial(smoke_test, parsed.smoke_test, environment, style)
        yield _section("Smoke test", (f"server on {parsed.smoke_test}", test))


def _section(title: str, *looks: tuple[str, Callable[[], Iterable[Finding]]]) -> Section:
    """looks: each with the name of the finding that stands for it where looking fails."""
    return Section(title, [one for name, look in looks for one in guarded(name, look)])
