"""``penstock bench``: measurements of a server and of the library."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from penstock.protocol.suggestions import closest

COMMANDS = {
    "serve": "put load on any OpenAI-compatible server and measure its answers",
    "report": "one HTML page of the results of bench serve: plots and comparisons",
    "throughput": "many prompts at once through the library: tokens a second",
    "latency": "one batch at a time through the library: milliseconds a token",
    "prefill": "prompts by length and by what is cached of them: tokens a second",
    "steps": "decode steps of the executor alone: device, host, kernels",
    "kernels": "each kernel alone, beside the floor of its bytes and operations",
    "startup": "from the command to the first token, phase by phase",
}
_PACKAGES = {"serve": "client", "report": "reports", "kernels": "kernel_benches"}
"""Which package holds a command's module, where it is not ``offline``."""
WRONG_FLAGS = 2


def main(arguments: Sequence[str]) -> int:
    """Run one of the commands with the flags after its name. Returns the exit code."""
    name = arguments[0] if arguments else ""
    if name in COMMANDS:
        package = _PACKAGES.get(name, "offline")
        module = importlib.import_module(f"penstock.loadtest.{package}.bench_{name}")
        code: int = module.main(arguments[1:])
        return code
    found = parser()
    parsed, _ = found.parse_known_args(arguments[:1])
    if parsed.command is not None:
        likely = closest(parsed.command, COMMANDS)
        meant = f"did you mean {likely}? " if likely else ""
        found.error(
            f"there is no command {parsed.command!r}: {meant}there are {', '.join(COMMANDS)}"
        )
    found.print_help(sys.stderr)
    return WRONG_FLAGS


def parser() -> argparse.ArgumentParser:
    """Of ``penstock bench`` alone; each command has one of its own."""
    table = "\n".join(f"  {name:12}{summary}" for name, summary in COMMANDS.items())
    found = argparse.ArgumentParser(
        "penstock bench",
        description="Measure a server or the library.",
        usage="penstock bench COMMAND [flags]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"commands:\n{table}\n\n`penstock bench COMMAND --help` lists the flags.",
    )
    found.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    return found
