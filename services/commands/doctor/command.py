"""The flags of ``penstock doctor``, and its report.

Exit codes: 0, 1 something would keep a server from working, 2 wrong flags, 130 interrupted.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from penstock.services.commands.doctor.finding import Section, as_text, count, verdict
from penstock.services.commands.parser import CommandParser
from penstock.services.commands.printable import printable

SMOKE_TESTS = ("cpu", "null", "none")


def parser() -> CommandParser:
    parser = CommandParser(
        "doctor",
        "[flags]",
        "Look at what a server needs of this machine, start one with the built-in model, and say "
        "what would keep one from working. What it prints holds no secrets and may be pasted into "
        "an issue.",
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
    sections = list(_sections(parsed, environment))
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
    yield Section("Software", [*software.software(), *software.settings(environment)])
    found = [*hardware.processor(machine)]
    if software.version("torch"):
        found += hardware.gpus(machine, hardware.probed(environment))
    yield Section("Machine", found)
    yield Section("Limits", [*limits.limits(machine.gpus)])
    yield Section(
        "Places",
        [
            *(places.port(*one, environment) for one in _addresses(parsed.port, environment)),
            places.sockets(environment, MAX_IPC_PATH),
            *places.folders(environment, machine.gpus),
        ],
    )
    if parsed.smoke_test != "none":
        test = smoke_test(parsed.smoke_test, environment, style_of(2, environment))
        yield Section("Smoke test", [*test])


def _addresses(port: int | None, environment: Mapping[str, str]) -> list[tuple[str, int]]:
    """Where a server would listen by the environment, for HTTP and for gRPC if it is to serve that;
    by default where that cannot be read. port: of HTTP, as the flag has it."""
    from penstock.protocol.config import ConfigError, resolve
    from penstock.protocol.config.server_fields import ServerConfig

    try:
        server = resolve(("server",), {}, environment)[0].server
    except ConfigError:
        server = ServerConfig()
    found = [(server.host, server.port if port is None else port)]
    if server.grpc_port is not None:
        found.append((server.grpc_host or server.host, server.grpc_port))
    return found
