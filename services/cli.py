"""The command ``penstock``: settings in, one process out.

Exit codes: 0 ended as asked, 1 internal error, or a server's refusal, 2 wrong settings, 3 the
model's folder cannot be served, 4 an address or port cannot be used, 5 refused or declared lost by
the router, 6 not ready in time (``serve``), 128 + signal when a second signal cut the draining
short.

Everything that costs time (zmq, aiohttp, torch) is imported after the arguments are read.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial

import msgspec

import penstock
from penstock.protocol.config import Config, ConfigError, resolve
from penstock.protocol.config.complete import complete, with_another_model
from penstock.protocol.config.host_checks import refuse_hosts_of_library
from penstock.protocol.config.machine import Machine, read_machine
from penstock.protocol.config.models import check_names, of_each, together
from penstock.protocol.config.role_checks import check_roles
from penstock.protocol.config.shown import show
from penstock.protocol.config.sleep_checks import check_sleep
from penstock.protocol.config.sources import Provenance, Source
from penstock.protocol.suggestions import closest
from penstock.services.command_table import (
    COMMANDS,
    MODEL_COMMANDS,
    TOOLS,
    Tool,
    listed,
    service_parser,
)
from penstock.services.commands.failure import CommandError

INTERNAL_ERROR, BAD_SETTINGS, BAD_MODEL, BAD_ADDRESS = 1, 2, 3, 4
INTERRUPTED = 130


NOT_EVERYWHERE = {
    "aiohttp", "huggingface_hub", "jinja2", "numpy", "psutil", "safetensors", "tokenizers", "torch",
    "transformers",
}  # fmt: skip
"""Packages of single roles: the dependency groups of pyproject.toml."""
Resolved = tuple[Config, Provenance]


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns the exit code; faults of the user go to standard error."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        return _main(arguments, time.monotonic())
    except SystemExit as request:  # argparse: help or a wrong flag
        return request.code if isinstance(request.code, int) else INTERNAL_ERROR
    except KeyboardInterrupt:  # before the service took over the signals
        return INTERRUPTED
    except BrokenPipeError:  # as in `penstock serve --show-config | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        code = _users_fault(error)
        if code is None:
            raise
        for line in str(error).splitlines():
            print(f"penstock: {line}", file=sys.stderr)
        return code


def _users_fault(error: Exception) -> int | None:
    """The exit code of an error that the user can repair; ``None``: a fault of ours."""
    if isinstance(error, ConfigError):
        return BAD_SETTINGS
    if isinstance(error, CommandError):
        return error.code
    # Only a service raises these, so their modules are loaded already.
    from penstock.protocol.model_info import BadModelFolder
    from penstock.protocol.process.faults import BadFault
    from penstock.protocol.wire.addresses import AddressError
    from penstock.protocol.wire.security import SecurityError

    if isinstance(error, BadModelFolder):
        return BAD_MODEL
    if isinstance(error, AddressError):
        return BAD_ADDRESS
    if isinstance(error, SecurityError | BadFault):
        return BAD_SETTINGS
    return None


def _main(arguments: Sequence[str], began: float) -> int:
    name = arguments[0] if arguments else ""
    if name not in COMMANDS:
        return _no_service(arguments)
    command = COMMANDS[name]
    internal, rest = _internal(arguments[1:])
    several = name == "serve"
    parsed = service_parser(name).parse_args(rest)
    config, sources = resolved = resolve(command.groups, parsed, os.environ, several=several)
    check_roles(name, config)
    if internal.headless:
        refuse_hosts_of_library(config)
    if config.launch.join and not parsed.show_config:
        return _join(name, config, sources, internal)
    builtin = command.takes_model and not (config.model.model or config.model.models)
    machine = read_machine(environment=os.environ)
    found = of_each(config, sources, devices=machine.gpus)
    if builtin or several:
        with naming_what_is_missing(name):
            found = [with_named_model(*one, only_look=parsed.show_config) for one in found]
    whole = [complete(*one, may_lack_model=parsed.show_config) for one in found]
    layout = ""
    if several and not internal.headless:
        whole, layout = _laid_out(found, whole, machine, internal)
    found = whole
    configs = [one for one, _ in found]
    check_names(configs)
    check_sleep(name, configs)
    if len(found) > 1:
        config, sources = complete(config, sources, may_lack_model=True)
    config, sources = together(config, sources, found)
    if name != "serve":
        config = _with_router(config, sources)
        configs = [config]
    if parsed.show_config:
        print(show(config, sources, command.groups))
        return 0
    if internal.parent_pid is not None:
        from penstock.protocol.process.parent_death import end_with_parent

        end_with_parent(internal.parent_pid)
    with naming_what_is_missing(name):
        return _run(name, configs, sources, internal, began, builtin, resolved, layout)


def _laid_out(
    resolved: Sequence[Resolved], whole: list[Resolved], machine: Machine, internal: Internal
) -> tuple[list[Resolved], str]:
    """The sizes of a server's only model, chosen by the plan where none was given, and a line about
    that. resolved: as given; whole: completed."""
    if len(whole) > 1:
        return whole, ""  # each is on devices of its own, or shares them
    from penstock.services.layout_choice import with_layout

    alone = bool(internal.one_engine)
    one, line = with_layout(resolved[0], whole[0], machine, one_engine=alone)
    return [one], line


def _join(name: str, config: Config, sources: Provenance, internal: Internal) -> int:
    """Start this host's part of another one's server."""
    if internal.parent_pid is not None:
        from penstock.protocol.process.parent_death import end_with_parent

        end_with_parent(internal.parent_pid)
    with naming_what_is_missing(name):
        from penstock.services.launcher import joined_host

        joined_host.check_flags(sources)
        return joined_host.run(config)


@contextlib.contextmanager
def naming_what_is_missing(name: str) -> Iterator[None]:
    """An image of one role lacks what the other roles import: say so. Raises ``ConfigError``."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing.startswith("penstock.loadtest"):
            raise ConfigError(
                f"`penstock {name}` is not in this installation, which is for one process of a "
                "server; pip install penstock installs all"
            ) from error
        package = missing.partition(".")[0]
        if package not in NOT_EVERYWHERE:
            raise
        raise ConfigError(
            f"`penstock {name}` needs the package {package}, which is not installed here: this "
            "installation is for other processes; pip install penstock installs what all need"
        ) from error


def _no_service(arguments: Sequence[str]) -> int:
    """``penstock``, ``penstock --help``, what is no process, and what is unknown."""
    if list(arguments[:1]) == ["help"] and len(arguments) > 1:
        return main([arguments[1], "--help"])
    if arguments and arguments[0] in MODEL_COMMANDS:
        from penstock.services import model_commands

        return model_commands.main(arguments[0], arguments[1:])
    tool = TOOLS.get(arguments[0]) if arguments else None
    if tool is not None and tool.module:
        return _tool(arguments[0], tool, arguments[1:])
    parser = argparse.ArgumentParser(
        "penstock",
        description=f"An LLM inference server made of small processes.\n\n{listed()}",
        usage="penstock COMMAND [flags]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="`penstock COMMAND --help` shows the flags of a command.",
        add_help=False,
    )
    parser.add_argument("-h", "--help", "--help-all", action="help", help=argparse.SUPPRESS)
    version = f"penstock {penstock.__version__}"
    parser.add_argument(
        "-V", "--version", action="version", version=version, help=argparse.SUPPRESS
    )
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    parsed, unread = parser.parse_known_args(arguments[:1])
    if parsed.command == "version":
        print(version)
        return 0
    if parsed.command == "help":
        parser.print_help()
        return 0
    if parsed.command is not None:
        parser.error(f"there is no command {parsed.command!r}: {_meant(parsed.command)}")
    if unread:
        parser.error(f"a command comes before {unread[0]}, as in `penstock serve {unread[0]}`")
    parser.print_help(sys.stderr)
    return BAD_SETTINGS


def _tool(name: str, tool: Tool, arguments: Sequence[str]) -> int:
    with naming_what_is_missing(name):
        module = importlib.import_module(f"penstock.{tool.module}")
        more = [os.environ] if tool.module.startswith("services.commands.") else []
        code: int = module.main(arguments, *more)
        return code


def _meant(word: str) -> str:
    """What somebody probably wants who gives ``word`` for a command."""
    known = [*COMMANDS, *TOOLS]
    if "/" in word:
        return f"`penstock serve {word}` serves a model"
    likely = closest(word, known)
    return (f"did you mean {likely}? " if likely else "") + f"there are {', '.join(known)}"


class Internal(msgspec.Struct, frozen=True):
    """What the launcher tells its children beside the settings; no part of the interface."""

    parent_pid: int | None = None
    number: int | None = None
    """Which of several alike: for the process's title."""
    listen_fd: int | None = None
    """The inherited HTTP socket of a frontend."""
    hold_fd: int | None = None
    """Of a process of an engine: prepare, and wait for a byte from this pipe."""
    on_device: int | None = None
    """1: it is to replace a worker, and prepares all that it can on that one's device."""
    headless: int | None = None
    """1: serve the library: no HTTP, and the end comes when standard input closes."""
    one_engine: int | None = None
    """1: the server of one conversation or measurement: where no sizes are given, one engine on the
    fewest GPUs that hold the model."""


def _internal(arguments: Sequence[str]) -> tuple[Internal, list[str]]:
    """Split the launcher's flags from the user's."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in Internal.__struct_fields__:
        parser.add_argument("--" + name.replace("_", "-"), type=int)
    found, rest = parser.parse_known_args(arguments)
    return Internal(**vars(found)), rest


def with_named_model(
    config: Config, sources: Provenance, *, only_look: bool
) -> tuple[Config, Provenance]:
    """The folder of the model that no folder was given for. Raises ``BadModelFolder``."""
    from penstock.services.launcher.named_model import with_builtin_model, with_hub_model

    if not config.model.model:
        return with_builtin_model(config, sources)
    return with_hub_model(config, sources, only_look=only_look)


def _with_router(config: Config, sources: Provenance) -> Config:
    """Processes started by hand meet at one address of the user's unless told another."""
    if config.cluster.router:
        return config
    from penstock.services.launcher.runtime_folder import default_router

    address = default_router(os.environ, config.cluster.runtime_dir)
    sources["router"] = Source("derived", "the user's own, for processes started by hand")
    return msgspec.structs.replace(
        config, cluster=msgspec.structs.replace(config.cluster, router=address)
    )


def _run(
    name: str,
    configs: Sequence[Config],
    sources: Provenance,
    internal: Internal,
    began: float,
    builtin: bool,
    resolved: Resolved,
    layout: str,
) -> int:
    """Become the process ``name``. configs: one for each model. builtin: it is the built-in one.
    resolved: what was given, which is made whole for each model. layout: which one was chosen and
    why."""
    number = "" if internal.number is None else f" {internal.number}"
    prepared = "" if internal.hold_fd is None else "prepared "
    _be_called(f"penstock: {prepared}{name}{number}")
    if name == "serve":
        from penstock.services.launcher import serve
        from penstock.services.layout_choice import check_sizes

        check_sizes(configs)
        if internal.headless:
            return serve.run_headless(configs[0])
        configure = partial(with_another_model, *resolved)
        return serve.run(configs, builtin=builtin, began=began, configure=configure, layout=layout)
    (config,) = configs
    if sources["router"].origin == "derived" and not config.cluster.runtime_dir:
        from penstock.services.launcher.runtime_folder import make_default_folder

        make_default_folder(config.cluster.router)
    if name == "worker" and config.device.device == "cuda":
        from penstock.services.worker.visible_device import show_one_device

        show_one_device(config.device.device_index, os.environ)
    extra: dict[str, object] = {}
    if internal.hold_fd is not None:
        from penstock.protocol.process.held_start import wait_until_wanted
        from penstock.services.held_process import import_all, prepare_on_device

        import_all(name, config)
        if internal.on_device:
            extra |= prepare_on_device(name, config)
        if not wait_until_wanted(internal.hold_fd):
            return 0
        _be_called(f"penstock: {name}{number}")
    service = importlib.import_module(f"penstock.services.{name}.service")
    if internal.listen_fd is not None:
        extra["listen_fd"] = internal.listen_fd
    code: int = service.run(config, **extra)
    return code


def _be_called(title: str) -> None:
    """As lists of processes show it."""
    with contextlib.suppress(ImportError):
        from setproctitle import setproctitle

        setproctitle(title)
