"""``penstock plan`` and ``penstock warm``: about a model and a GPU, without serving it."""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec

from penstock.protocol.config import ConfigError, build_parser, resolve
from penstock.protocol.config.complete import complete
from penstock.protocol.config.flags import FlagParser
from penstock.protocol.config.machine import read_machine
from penstock.protocol.config.role_checks import check_roles
from penstock.protocol.config.shown import show
from penstock.services import layout_command
from penstock.services.cli import naming_what_is_missing, with_named_model
from penstock.services.command_table import COMMANDS

_NOT_HERE = {"null": "loads no model", "cpu": "has no kernels that are compiled ahead"}


class ModelCommand(msgspec.Struct, frozen=True):
    """A command that looks at a model and a GPU without serving it."""

    summary: str
    """For the help; the flags are those of ``penstock serve``, and ``--gpu``."""
    refusal: str
    """What there is not to do for a device that loads no model."""
    gpu_only: bool = False


MODEL_COMMANDS = {
    "plan": ModelCommand(
        "How a model fits a device, or several (--gpus). Exit code 1: it does not.",
        "there is nothing to plan",
    ),
    "warm": ModelCommand(
        "Compile a model's kernels for a GPU into Triton's cache (TRITON_CACHE_DIR); needs no GPU. "
        "Takes the flags of `penstock serve`. Exit code 1: some failed.",
        "there is nothing to compile",
        gpu_only=True,
    ),
}


def parser(name: str) -> FlagParser:
    chosen, groups = MODEL_COMMANDS[name], COMMANDS["serve"].groups
    found = build_parser(f"penstock {name}", chosen.summary, groups, positional_model=True)
    found.add_argument(
        "--gpu", metavar="NAME", help="a GPU that need not be here: h100, a100, l40s, …"
    )
    if name == "plan":
        layout_command.add_flags(found)
    return found


def main(name: str, arguments: Sequence[str]) -> int:
    """Run the command ``name``; returns the exit code. Raises as ``penstock serve`` does."""
    chosen, groups = MODEL_COMMANDS[name], COMMANDS["serve"].groups
    parsed = parser(name).parse_args(arguments)
    config, sources = resolve(groups, parsed, os.environ)
    check_roles(name, config)
    with naming_what_is_missing(name):
        from penstock.services.worker.gpus import gpu_named

        gpu = None if parsed.gpu is None else gpu_named(parsed.gpu)
        device = config.device.device
        if device == "null" or (chosen.gpu_only and device == "cpu"):
            raise ConfigError(f"--device {device} {_NOT_HERE[device]}: {chosen.refusal}")
        if gpu is not None and device == "cpu":
            raise ConfigError(f"--gpu {parsed.gpu} and --device {device} name two devices")
        machine = read_machine(environment=os.environ)
        if name == "plan" and layout_command.asked_for(parsed):
            text, code = layout_command.run(config, sources, machine, parsed)
            print(text)
            return code
        config, sources = with_named_model(config, sources, only_look=False)
        if gpu is not None:
            devices = config.device.device_index + config.cluster.world_size
            machine = msgspec.structs.replace(machine, gpus=max(devices, machine.gpus))
        config, sources = complete(config, sources, machine, may_lack_model=False)
        if parsed.show_config:
            print(show(config, sources, groups))
            return 0
        if name == "plan":
            from penstock.services.worker.plan import report
            from penstock.services.worker.role_plan import engines_with_roles

            text, code = report(config, gpu)
            text = "\n".join([text, *engines_with_roles(config)])
        else:
            from penstock.services.worker.warm import warm

            text, code = warm(config, gpu)
        print(text)
        return code
